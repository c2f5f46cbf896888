"""Converts the prepared graph to integers: the converted modules, and a graph without training-only operators."""
