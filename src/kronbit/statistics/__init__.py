"""Where M of an update comes from: gradients (Shampoo, CASPR) or activations (K-FAC, AdaBK)."""

from kronbit.statistics.base import Source, Statistics
from kronbit.statistics.gradients import GradientStatistics

__all__ = ["GradientStatistics", "Source", "Statistics"]
