"""The questions that `qatkit-verify` asks of a bundle here, one per file. Each yields `base.Found`."""
