"""Turns weights outside of modules into modules (see `qatkit.graph.weights.lift`)."""
