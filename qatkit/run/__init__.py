"""A run: its folder and process, the model and data that it builds, its training loop, and the files that it writes."""
