"""Training on the Lightning Trainer: one process or several, validation, and continuing from a checkpoint."""
