"""Blocks of parameters, and stacks of blocks."""
