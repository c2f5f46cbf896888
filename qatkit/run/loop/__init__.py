"""Training with the Lightning Trainer: single or several processes, validation, and resuming from a checkpoint."""
