"""Curves of a number over the course of training, averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from kronbit.lab.report.runs import Run


@dataclass(frozen=True)
class Curve:
    """Mean, minimum and maximum of a number over runs, at the steps that all runs have.

    If the number of one run is not finite, the mean is not finite either: no run is left out.
    """

    steps: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def finite(self) -> int:
        """Number of points before the first one that is not finite."""
        broken = (i for i, value in enumerate(self.mean) if not math.isfinite(value))
        return next(broken, len(self.mean))

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
    """Return the curve of a number of the metrics.

    Args:
        runs: Seeds of one variant.
        kind: Kind of the metrics lines.
        key: Key of the number. Lines without it are skipped.
    """
    points: list[dict[float, Mapping[str, Any]]] = [
        {line["step"]: line for line in getattr(run, kind) if line.get(key) is not None}
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, points)))
    at_step = [[lines[step] for lines in points] for step in steps]
    values = [[line[key] for line in lines] for lines in at_step]
    return Curve(
        steps=steps,
        seconds=[mean([line.get("seconds", math.nan) for line in lines]) for lines in at_step],
        mean=list(map(mean, values)),
        low=list(map(min, values)),
        high=list(map(max, values)),
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)
