"""Training: the loop, and everything that makes it safe to stop."""
