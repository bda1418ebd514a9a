"""Factors: batches of preconditioners of one order and their inverse roots."""

from kronbit.factors.layout import Layout, Leaves, is_root, is_statistic
from kronbit.factors.stack import Batch, Factors, make_method

__all__ = ["Batch", "Factors", "Layout", "Leaves", "is_root", "is_statistic", "make_method"]
