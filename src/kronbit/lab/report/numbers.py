"""How the lab writes numbers, in the terminal, in reports and in figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

MISSING = "\u2013"  # a dash as long as a number is wide

Write = Callable[[float | None], str]


def _of_finite(write: Callable[[float], str]) -> Write:
    """Write a dash where there is no number, and NaN and inf as such."""

    @wraps(write)
    def text(value: float | None) -> str:
        if value is None:
            return MISSING
        if math.isnan(value):
            return "NaN"
        return write(value) if math.isfinite(value) else f"{value}"

    return text


@_of_finite
def loss_text(value: float) -> str:
    """A loss or an error."""
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 100 else f"{value:,.1f}"


@_of_finite
def percent_text(value: float) -> str:
    """A share of one."""
    return f"{100 * value:.1f} %"


@_of_finite
def share_text(value: float) -> str:
    """A ratio, in percent, to three digits."""
    return f"{100 * value:.3g} %"


@_of_finite
def bytes_text(value: float) -> str:
    """Memory in the unit that suits its size."""
    if value == 0:
        return "0"
    unit, size = ("KiB", 2**10) if value < 2**20 else ("MiB", 2**20)
    if value >= 10 * 2**30:
        unit, size = "GiB", 2**30
    amount = value / size
    return f"{amount:.1f} {unit}" if abs(amount) < 100 else f"{amount:,.0f} {unit}"


@_of_finite
def time_text(value: float) -> str:
    """Milliseconds or seconds, without the unit."""
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


@_of_finite
def degrees_text(value: float) -> str:
    """An angle."""
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:.{digits}f}°"


@_of_finite
def count_text(value: float) -> str:
    """A whole number."""
    return f"{value:,}"
