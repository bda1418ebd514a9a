"""Factors: batches of preconditioners of one order and their inverse roots."""

from kronbit.factors.stack import Factors, finite_rows, make_method
from kronbit.factors.storage import Layout, Leaves, is_root

__all__ = ["Factors", "Layout", "Leaves", "finite_rows", "is_root", "make_method"]
