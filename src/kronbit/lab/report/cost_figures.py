"""Figures of what each optimizer costs: memory, and the time of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kronbit.lab.report.drawing import (
    GREY,
    INK,
    ORANGE,
    Drawing,
    Line,
    in_words,
    is_dark,
    log_scale,
    row_figure,
    to_png,
)
from kronbit.lab.report.numbers import bytes_text, share_text, time_text
from kronbit.lab.report.outcomes import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Beside the boxes: where each number ends, in points from the axes.
_TIME_COLUMNS = ((36, "median"), (68, "mean"))
# Memory that one optimizer takes: its key in the summary, its name, its colour.
_PARTS = (
    ("parameters", "parameters", GREY),
    ("gradients", "gradients", GREY),
    ("base", "base's state", GREY),
    ("statistics", "statistics", ORANGE),
    ("roots", "inverse roots", ORANGE),
)

# A row of bars: its name, its colour, its length in bytes, and what is written beside it.
_Bar = tuple[str, str, float, str]


def memory_figures(lines: Sequence[Line]) -> list[Drawing]:
    """Second-order state and peak memory; of a single optimizer, all parts of its memory.

    Args:
        lines: The optimizers.
    """
    what = peak_kind([line.outcome for line in lines])
    if len(lines) == 1:
        drawn = [_parts(lines[0].outcome, what)]
    else:
        drawn = [_state(lines), _peak(lines, what)]
    return [drawing for drawing in drawn if drawing is not None]


def _parts(own: Outcome, what: str) -> Drawing | None:
    peak = ("peak", f"peak, {what}" if what else "peak", INK)
    bars = [
        (name, colour, spread.mean, _held(spread.mean))
        for key, name, colour in (*_PARTS, peak)
        if (spread := own.spread("memory", key)) is not None
    ]
    caption = "What is held between steps, and the most that training took."
    return _bars("memory", "Memory", caption, "memory", bars)


def _state(lines: Sequence[Line]) -> Drawing | None:
    bars = []
    for line in lines:
        own = line.outcome
        if own.state is not None:
            text = _held(own.state.mean)
            if own.of_32 is not None and own.of_32 < 1:
                text += f", {share_text(own.of_32)} of 32-bit"
            bars.append((own.full_label, line.colour, own.state.mean, text))
    caption = "Statistics and inverse roots, as they are stored between steps."
    return _bars("state", "Second-order state", caption, "statistics and inverse roots", bars)


def _peak(lines: Sequence[Line], what: str) -> Drawing | None:
    bars = [
        (line.outcome.full_label, line.colour, peak.mean, bytes_text(peak.mean))
        for line in lines
        if (peak := line.outcome.spread("memory", "peak")) is not None
    ]
    caption = f"The most memory that training took{f': {what}' if what else ''}."
    return _bars("peak", "Peak memory", caption, what or "peak memory", bars)


def _held(size: float) -> str:
    return bytes_text(size) if size else "none"


def peak_kind(found: Sequence[Outcome]) -> str:
    """What peak memory is, in words.

    Args:
        found: Whose.
    """
    runs = [run for own in found for run in own.counted]
    kinds = [(run.summary.get("memory") or {}).get("peak_is") for run in runs]
    return ", ".join(dict.fromkeys(str(kind) for kind in kinds if kind))


def _bars(name: str, title: str, caption: str, axis: str, bars: Sequence[_Bar]) -> Drawing | None:
    """Horizontal bars, from the top, the text inside of long ones and behind short ones."""
    most = max((value for *_, value, _ in bars), default=0)
    if not most > 0:
        return None
    power = min(max(int(math.log2(most)) // 10, 1), 3)
    size, unit = 2 ** (10 * power), ("KiB", "MiB", "GiB")[power - 1]
    figure, axes = row_figure([label for label, *_ in bars])
    for place, (_, colour, value, text) in enumerate(bars):
        axes.barh(place, value / size, height=0.62, color=colour)
        inside = value > 0.55 * most
        axes.annotate(
            text,
            (value / size, place),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            color="white" if inside and is_dark(colour) else INK,
            fontsize=8.5,
        )
    axes.set(xlim=(0, 1.04 * most / size), xlabel=f"{axis}, {unit}")
    told = ", ".join(f"{label} {text}" for label, _, _, text in bars)
    return Drawing(name, title, caption, f"Bars of {title.lower()}: {told}.", to_png(figure))


def time_figure(lines: Sequence[Line]) -> Drawing | None:
    """Boxes of step times; far outside are updates and refreshes, and the first steps.

    Args:
        lines: The optimizers.
    """
    times_of = (
        (line, [time for run in line.outcome.counted for time in run.step_ms if time > 0])
        for line in lines
    )
    rows = [(line, times) for line, times in times_of if times]
    if not rows:
        return None
    figure, axes = row_figure([line.outcome.full_label for line, _ in rows])
    low, high = min(min(times) for _, times in rows), max(max(times) for _, times in rows)
    log_scale(axes, "x", within=high / low < 100)
    for place, (line, times) in enumerate(rows):
        axes.boxplot(
            times,
            positions=[place],
            orientation="horizontal",
            widths=0.5,
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": line.colour, "edgecolor": line.colour},
            medianprops={"color": "white" if is_dark(line.colour) else "black", "linewidth": 1.6},
            whiskerprops={"color": line.colour},
            capprops={"color": line.colour},
            flierprops={"marker": "|", "markeredgecolor": line.colour, "alpha": 0.55},
        )
        for right, key in _TIME_COLUMNS:
            spread = line.outcome.spread("step_ms", key)
            _beside(axes, time_text(spread.mean) if spread else "", place, right)
    for right, key in _TIME_COLUMNS:
        _beside(axes, key, -0.6, right)
    axes.set(xlim=(low / 1.15, high * 1.15), xlabel="milliseconds per step")
    return Drawing(
        "step_time",
        "Time per step",
        "Boxes: the middle half of the steps. Ticks outside are single steps: those that update or"
        " refresh the preconditioners, and the first ones. The mean counts them, too.",
        "Box plots of step times; medians in ms: "
        + in_words(lines, time_text, "step_ms", "median"),
        to_png(figure),
    )


def _beside(axes: Axes, text: str, row: float, right: float) -> None:
    """Write to the right of a row."""
    axes.annotate(
        text,
        (1, row),
        xycoords=axes.get_yaxis_transform(),
        xytext=(right, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8.5,
    )
