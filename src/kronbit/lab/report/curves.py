"""Curves of a number over the course of training, averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, Literal

from kronbit.lab.report.runs import Run


@dataclass(frozen=True)
class Curve:
    """Mean, minimum and maximum of a number over runs, at the steps that all runs have.

    No run is left out: if the number of one is not finite, the mean is not finite either.
    """

    steps: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def finite(self) -> int:
        """Number of points before the first one that is not finite."""
        return len(list(takewhile(math.isfinite, self.mean)))

    @property
    def diverged(self) -> bool:
        """True if a point is not finite."""
        return self.finite < len(self.mean)

    def first_at_most(self, bound: float) -> float | None:
        """Return the first step whose mean is at most the bound, or None."""
        points = zip(self.steps, self.mean, strict=True)
        return next((step for step, value in points if value <= bound), None)

    def smoothed(self) -> list[float]:
        """Return a moving average whose window is about 1/25 of the curve."""
        reach, end = len(self.mean) // 50, self.finite
        sums = [0.0, *accumulate(self.mean[:end])]
        result = []
        for i in range(end):
            half = min(reach, i, end - 1 - i)  # symmetric, or the average would lag
            result.append((sums[i + half + 1] - sums[i - half]) / (2 * half + 1))
        return result + self.mean[end:]


def curve(runs: Sequence[Run], kind: Literal["train", "evals", "errors"], key: str) -> Curve:
    """Return the curve of a number over the seeds of a variant. Lines without it are skipped."""
    points: list[dict[float, Mapping[str, Any]]] = [
        {line["step"]: line for line in getattr(run, kind) if line.get(key) is not None}
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, points)))
    at_step = [[lines[step] for lines in points] for step in steps]
    seconds = [mean([line.get("seconds", math.nan) for line in lines]) for lines in at_step]
    values = [[line[key] for line in lines] for lines in at_step]
    average, low, high = map(mean, values), map(min, values), map(max, values)
    return Curve(steps, seconds, list(average), list(low), list(high))


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)
