"""Measured placement as a file: contents (`record`), decision (`decide`), `qatkit-measure` (`measure`)."""
