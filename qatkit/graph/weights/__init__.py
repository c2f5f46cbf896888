"""Weights wherever they are: see `qatkit.graph.weights.lift`."""
