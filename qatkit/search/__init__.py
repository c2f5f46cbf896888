"""Searches for good settings: Optuna proposes settings for many runs (trials), which several workers can share."""
