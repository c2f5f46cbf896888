"""qatkit."""
