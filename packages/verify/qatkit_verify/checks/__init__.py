"""The questions that `qatkit-verify` asks of a bundle on this machine, one per file. Each yields `base.Found`."""
