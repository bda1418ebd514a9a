"""Formatting of numbers for the terminal, reports and figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

MISSING = "\u2013"  # an en dash, as wide as a digit

Write = Callable[[float | None], str]


def _formatter(write: Callable[[float], str]) -> Write:
    """Extend a formatter of finite numbers: None becomes a dash, NaN and inf keep their names."""

    @wraps(write)
    def text(value: float | None) -> str:
        if value is None:
            return MISSING
        if math.isnan(value):
            return "NaN"
        return write(value) if math.isfinite(value) else f"{value}"

    return text


@_formatter
def loss_text(value: float) -> str:
    """Format a loss or an error with four decimals, or in scientific notation."""
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 100 else f"{value:,.1f}"


@_formatter
def ratio_text(value: float) -> str:
    """Format a ratio with two decimals."""
    return f"{value:.2f}"


@_formatter
def percent_text(value: float) -> str:
    """Format a fraction of 1 as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


@_formatter
def share_text(value: float) -> str:
    """Format a ratio as a percentage with three significant digits."""
    return f"{100 * value:.3g} %"


@_formatter
def bytes_text(value: float) -> str:
    """Format a number of bytes as KiB, MiB or GiB, whichever suits its size."""
    if value == 0:
        return "0"
    unit, size = ("KiB", 2**10) if value < 2**20 else ("MiB", 2**20)
    if value >= 10 * 2**30:
        unit, size = "GiB", 2**30
    amount = value / size
    return f"{amount:.1f} {unit}" if abs(amount) < 100 else f"{amount:,.0f} {unit}"


@_formatter
def time_text(value: float) -> str:
    """Format milliseconds or seconds, without the unit."""
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


@_formatter
def degrees_text(value: float) -> str:
    """Format an angle in degrees."""
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:.{digits}f}°"


@_formatter
def count_text(value: float) -> str:
    """Format an integer with thousands separators."""
    return f"{value:,}"
