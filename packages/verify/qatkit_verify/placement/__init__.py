"""A measured placement: its file (`record`), the decision (`decide`), and `qatkit-measure` (`measure`)."""
