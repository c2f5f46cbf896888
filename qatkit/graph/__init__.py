"""Passes over a model's graph: trace, fuse, stub, prepare, convert."""
