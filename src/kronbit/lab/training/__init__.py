"""Training: the loop, its checkpoints, and its files."""
