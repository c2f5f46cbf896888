"""Measured placement as a file: its contents (`record`), the decision (`decide`), and `qatkit-measure` (`measure`)."""
