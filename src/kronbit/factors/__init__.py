"""Factors: stacks of preconditioners of one order and their inverse roots."""

from kronbit.factors.stack import Batch, Factors, make_method
from kronbit.factors.storage import Layout, Leaves, is_root, is_statistic

__all__ = ["Batch", "Factors", "Layout", "Leaves", "is_root", "is_statistic", "make_method"]
