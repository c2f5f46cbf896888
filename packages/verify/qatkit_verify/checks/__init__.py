"""The checks that `qatkit-verify` runs on a bundle, one per file. Each returns `base.Found`."""
