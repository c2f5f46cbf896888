"""Passes over the one graph: trace, fuse, stub, prepare, convert."""
