"""Quantisation errors of preconditioners: the paper's tables and figures, and checkpoints."""
