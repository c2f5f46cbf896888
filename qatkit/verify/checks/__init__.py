"""The checks of an exported file: each check is a class of its own, listed in `verify.checks`."""
