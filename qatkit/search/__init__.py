"""Searches for good settings: Optuna proposes those of many runs (trials), which several workers can share."""
