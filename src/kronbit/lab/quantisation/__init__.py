"""Quantisation errors: the paper's tables and figures, and those of a checkpoint."""
