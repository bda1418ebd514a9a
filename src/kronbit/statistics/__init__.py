"""The source of M in an update: gradients (Shampoo, CASPR) or activations (K-FAC, AdaBK)."""

from kronbit.statistics.base import MatrixOf, Statistics
from kronbit.statistics.gradients import GradientStatistics

__all__ = ["GradientStatistics", "MatrixOf", "Statistics"]
