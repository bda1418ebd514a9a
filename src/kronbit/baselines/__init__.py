"""Optimizers that kronbit is compared with in the paper's tables; it recommends neither."""

from kronbit.baselines.eva import EVA
from kronbit.baselines.mfac import MFAC

__all__ = ["EVA", "MFAC"]
