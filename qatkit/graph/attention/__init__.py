"""What opens attention, and the twins that take its place."""
