"""What is asked of an exported file: each check a class of its own, listed in `verify.checks`."""
