"""The configuration: its schema, its limits, and the command line that makes one."""
