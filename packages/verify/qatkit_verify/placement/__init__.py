"""Measured placement as a file: what it says (`record`), who decides (`decide`), and `qatkit-measure` (`measure`)."""
