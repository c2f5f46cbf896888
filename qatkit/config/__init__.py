"""The configuration: its schema, the rules for its values, and how YAML and overrides become one."""
