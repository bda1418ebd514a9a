"""Figures of the cost of each optimizer: memory and step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kronbit.lab.report.drawing import (
    GREY,
    INK,
    ORANGE,
    Drawing,
    LegendEntry,
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

# Numbers to the right of the boxes: their distance from the axes in points, and their key.
_TIME_COLUMNS = ((36, "median"), (68, "mean"))
# Parts of the memory of an optimizer: key in the summary, name and color.
_PARTS = (
    ("parameters", "parameters", GREY),
    ("gradients", "gradients", GREY),
    ("base", "base's state", GREY),
    ("statistics", "statistics", ORANGE),
    ("roots", "inverse roots", ORANGE),
)

# A bar: its label, its color, its length in bytes, and the text at its end.
_Bar = tuple[str, str, float, str]


def memory_figures(entries: Sequence[LegendEntry]) -> list[Drawing]:
    """Draw second-order state and peak memory, or all parts of the memory of a single optimizer.

    Args:
        entries: The optimizers.
    """
    kind = peak_kind([entry.outcome for entry in entries])
    if len(entries) == 1:
        drawn = [_parts(entries[0].outcome, kind)]
    else:
        drawn = [_state(entries), _peak(entries, kind)]
    return [drawing for drawing in drawn if drawing is not None]


def _parts(outcome: Outcome, kind: str) -> Drawing | None:
    peak = ("peak", f"peak, {kind}" if kind else "peak", INK)
    bars = [
        (name, color, spread.mean, _held(spread.mean))
        for key, name, color in (*_PARTS, peak)
        if (spread := outcome.spread("memory", key)) is not None
    ]
    caption = "Memory held between steps, and the largest amount during training."
    return _bars("memory", "Memory", caption, "memory", bars)


def _state(entries: Sequence[LegendEntry]) -> Drawing | None:
    bars = []
    for entry in entries:
        state, of_32 = entry.outcome.state, entry.outcome.of_32
        if state is not None:
            text = _held(state.mean)
            if of_32 is not None and of_32 < 1:
                text += f", {share_text(of_32)} of 32-bit"
            bars.append((entry.outcome.full_label, entry.color, state.mean, text))
    caption = "Statistics and inverse roots, as stored between steps."
    return _bars("state", "Second-order state", caption, "statistics and inverse roots", bars)


def _peak(entries: Sequence[LegendEntry], kind: str) -> Drawing | None:
    bars = [
        (entry.outcome.full_label, entry.color, peak.mean, bytes_text(peak.mean))
        for entry in entries
        if (peak := entry.outcome.spread("memory", "peak")) is not None
    ]
    caption = f"The largest amount of memory during training{f': {kind}' if kind else ''}."
    return _bars("peak", "Peak memory", caption, kind or "peak memory", bars)


def _held(size: float) -> str:
    return bytes_text(size) if size else "none"


def peak_kind(compared: Sequence[Outcome]) -> str:
    """Describe how peak memory was measured.

    Args:
        compared: Outcomes whose peak memory is shown.
    """
    runs = [run for outcome in compared for run in outcome.counted]
    kinds = [(run.summary.get("memory") or {}).get("peak_is") for run in runs]
    return ", ".join(dict.fromkeys(str(kind) for kind in kinds if kind))


def _bars(name: str, title: str, caption: str, axis: str, bars: Sequence[_Bar]) -> Drawing | None:
    """Draw horizontal bars. The text is inside long bars and to the right of short ones."""
    most = max((value for *_, value, _ in bars), default=0)
    if not most > 0:
        return None
    power = min(max(int(math.log2(most)) // 10, 1), 3)
    size, unit = 2 ** (10 * power), ("KiB", "MiB", "GiB")[power - 1]
    figure, axes = row_figure([label for label, *_ in bars])
    for place, (_, color, value, text) in enumerate(bars):
        axes.barh(place, value / size, height=0.62, color=color)
        inside = value > 0.55 * most
        axes.annotate(
            text,
            (value / size, place),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            color="white" if inside and is_dark(color) else INK,
            fontsize=8.5,
        )
    axes.set(xlim=(0, 1.04 * most / size), xlabel=f"{axis}, {unit}")
    words = ", ".join(f"{label} {text}" for label, _, _, text in bars)
    return Drawing(name, title, caption, f"Bars of {title.lower()}: {words}.", to_png(figure))


def time_figure(entries: Sequence[LegendEntry]) -> Drawing | None:
    """Draw box plots of step times, with medians and means.

    Args:
        entries: The optimizers.
    """
    times_of = (
        (entry, [time for run in entry.outcome.counted for time in run.step_ms if time > 0])
        for entry in entries
    )
    rows = [(entry, times) for entry, times in times_of if times]
    if not rows:
        return None
    figure, axes = row_figure([entry.outcome.full_label for entry, _ in rows])
    low, high = min(min(times) for _, times in rows), max(max(times) for _, times in rows)
    log_scale(axes, "x", within=high / low < 100)
    for place, (entry, times) in enumerate(rows):
        axes.boxplot(
            times,
            positions=[place],
            orientation="horizontal",
            widths=0.5,
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": entry.color, "edgecolor": entry.color},
            medianprops={"color": "white" if is_dark(entry.color) else "black", "linewidth": 1.6},
            whiskerprops={"color": entry.color},
            capprops={"color": entry.color},
            flierprops={"marker": "|", "markeredgecolor": entry.color, "alpha": 0.55},
        )
        for right, key in _TIME_COLUMNS:
            spread = entry.outcome.spread("step_ms", key)
            _beside(axes, time_text(spread.mean) if spread else "", place, right)
    for right, key in _TIME_COLUMNS:
        _beside(axes, key, -0.6, right)
    axes.set(xlim=(low / 1.15, high * 1.15), xlabel="milliseconds per step")
    return Drawing(
        "step_time",
        "Time per step",
        "Boxes: the middle half of the steps. Ticks outside: single steps, which update or refresh"
        " the preconditioners or are the first ones. They are part of the mean.",
        "Box plots of step times; medians in ms: "
        + in_words(entries, time_text, "step_ms", "median"),
        to_png(figure),
    )


def _beside(axes: Axes, text: str, row: float, right: float) -> None:
    """Write text to the right of a row."""
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
