"""A run: its folder and process, what its configuration builds, the training loop, the files that it writes."""
