"""Converts the prepared graph to integers: its converted modules, and the removal of training-only operators."""
