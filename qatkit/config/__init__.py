"""The configuration: its schema, the rules for its values, and its composition from YAML and overrides."""
