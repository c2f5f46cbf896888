"""Bundles of finished runs for deployment, which `qatkit-verify` checks without this package."""
