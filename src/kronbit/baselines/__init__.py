"""EVA and M-FAC, the second-order baselines of the paper's tables. Neither is a recommendation."""

from kronbit.baselines.eva import EVA
from kronbit.baselines.mfac import MFAC

__all__ = ["EVA", "MFAC"]
