"""How the lab writes numbers, in the terminal, in reports and in figures."""

from __future__ import annotations

import math

MISSING = "\u2013"  # a dash as long as a number is wide


def loss_text(value: float | None) -> str:
    """A loss or an error, with NaN and inf as such."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 100 else f"{value:,.1f}"


def percent_text(value: float | None) -> str:
    """A share of one."""
    if value is None:
        return MISSING
    return f"{100 * value:.1f} %" if math.isfinite(value) else loss_text(value)


def share_text(value: float | None) -> str:
    """A ratio, in percent, to three digits."""
    return MISSING if value is None else f"{100 * value:.3g} %"


def bytes_text(value: float | None) -> str:
    """Memory in the unit that suits its size."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    unit, size = next(
        (unit, size)
        for unit, size, least in (
            ("GiB", 2**30, 10 * 2**30),
            ("MiB", 2**20, 2**20),
            ("KiB", 2**10, -math.inf),
        )
        if value >= least
    )
    amount = value / size
    return f"{amount:.1f} {unit}" if abs(amount) < 100 else f"{amount:,.0f} {unit}"


def time_text(value: float | None) -> str:
    """Milliseconds or seconds, without the unit."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return loss_text(value)
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def degrees_text(value: float | None) -> str:
    """An angle."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return loss_text(value)
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:.{digits}f}°"


def count_text(value: float | None) -> str:
    """A whole number."""
    return MISSING if value is None else f"{value:,}"
