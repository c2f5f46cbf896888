"""What leaves the house: a bundle of a finished run, which `qatkit-verify` checks without us."""
