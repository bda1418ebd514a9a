"""Triton kernels of the linear algebra and of the ordinary step; see ``guard``."""
