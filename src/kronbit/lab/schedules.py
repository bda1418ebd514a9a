"""Learning rate schedules, as functions of the step, so that a resumed run needs no state."""

from __future__ import annotations

import math

from kronbit.lab.recipe import Recipe


def warmup_steps(recipe: Recipe, steps: int, steps_per_epoch: float) -> int:
    """Return the number of warm-up steps."""
    return round(recipe.warmup * steps + recipe.warmup_epochs * steps_per_epoch)


def factor(schedule: str, step: int, steps: int, warmup: int) -> float:
    """Return the learning rate divided by its maximum, at a step counted from 0."""
    if schedule == "schedule-free":  # F handles the warm-up itself
        return 1.0
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "multistep":
        return 0.1 ** (step // max(1, math.ceil(0.3 * steps)))
    if schedule == "constant":
        return 1.0
    left = 1 - (step - warmup) / max(1, steps - warmup)
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
