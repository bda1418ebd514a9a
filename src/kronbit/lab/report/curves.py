"""A number over the course of training, of one run or of several seeds together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from kronbit.lab.report.runs import Run


@dataclass(frozen=True)
class Curve:
    """Means and extremes over some runs, at the steps that all of them have.

    A mean with a run in it that is not finite is not finite: no run is left out of it.
    """

    steps: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def finite(self) -> int:
        """How many points there are until the first that is not a finite number."""
        broken = (i for i, value in enumerate(self.mean) if not math.isfinite(value))
        return next(broken, len(self.mean))

    @property
    def diverged(self) -> bool:
        """Whether there is a point that is not a finite number."""
        return self.finite < len(self.mean)

    def first_at_most(self, bound: float) -> float | None:
        """The first step whose mean is not above the bound."""
        return next(
            (step for step, value in zip(self.steps, self.mean, strict=True) if value <= bound),
            None,
        )

    def smoothed(self) -> list[float]:
        """Means over neighbours, so many that some 25 of them cover the curve."""
        reach, end = len(self.mean) // 50, self.finite
        sums = [0.0, *accumulate(self.mean[:end])]
        result = []
        for i in range(end):
            own = min(reach, i, end - 1 - i)  # as many on both sides, or it would lag
            result.append((sums[i + own + 1] - sums[i - own]) / (2 * own + 1))
        return result + self.mean[end:]


def curve(runs: Sequence[Run], kind: Literal["train", "evals", "errors"], key: str) -> Curve:
    """The curve of a number in the lines of some runs.

    Args:
        runs: Seeds of one variant.
        kind: Which lines.
        key: Which number; lines without it are passed over.
    """
    points: list[dict[float, Mapping[str, Any]]] = [
        {line["step"]: line for line in getattr(run, kind) if line.get(key) is not None}
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, points))) if points else []
    values = [[own[step][key] for own in points] for step in steps]
    return Curve(
        steps=steps,
        seconds=[_mean([own[step].get("seconds", math.nan) for own in points]) for step in steps],
        mean=[_mean(own) for own in values],
        low=[min(own) for own in values],
        high=[max(own) for own in values],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
