"""The command line: arguments, help, configuration reference and launchers."""
