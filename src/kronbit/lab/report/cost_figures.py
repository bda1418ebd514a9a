"""Figures of the cost of each optimizer: memory and step times."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kronbit.lab.report.drawing import (
    GREY,
    INK,
    ORANGE,
    Drawing,
    in_words,
    is_dark,
    log_scale,
    row_figure,
    to_png,
)
from kronbit.lab.report.numbers import bytes_text, share_text, time_text
from kronbit.lab.report.outcomes import Outcome

# Numbers to the right of the boxes: their distance from the axes in points, and their name.
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


def memory_figures(compared: Sequence[Outcome]) -> list[Drawing | None]:
    """Draw second-order state and peak memory, or all parts of the memory of a single optimizer."""
    kind = peak_kind(compared)
    of_kind = f": {kind}" if kind else ""
    if len(compared) == 1:
        parts = (*_PARTS, ("peak", f"peak, {kind}" if kind else "peak", INK))
        sizes = [(name, color, compared[0].number(f"memory.{key}")) for key, name, color in parts]
        held = [(name, color, size, _held(size)) for name, color, size in sizes if size is not None]
        caption = "Memory held between steps, and the largest amount during training."
        return [_bars("memory", "Memory", caption, "memory", held)]
    states, peaks = [], []
    for outcome in compared:
        state, of_32 = outcome.number("state"), outcome.number("of_32")
        peak = outcome.number("memory.peak")
        if state is not None:
            of_full = f", {share_text(of_32)} of 32-bit" if of_32 is not None and of_32 < 1 else ""
            states.append((outcome.full_label, outcome.color, state, _held(state) + of_full))
        if peak is not None:
            peaks.append((outcome.full_label, outcome.color, peak, bytes_text(peak)))
    caption = "Statistics and inverse roots, as stored between steps."
    largest = f"The largest amount of memory during training{of_kind}."
    return [
        _bars("state", "Second-order state", caption, "statistics and inverse roots", states),
        _bars("peak", "Peak memory", largest, kind or "peak memory", peaks),
    ]


def _held(size: float) -> str:
    return bytes_text(size) if size else "none"


def peak_kind(compared: Sequence[Outcome]) -> str:
    """Describe how peak memory was measured."""
    runs = [run for outcome in compared for run in outcome.counted]
    kinds = [(run.summary.get("memory") or {}).get("peak_is") for run in runs]
    return ", ".join(dict.fromkeys(str(kind) for kind in kinds if kind))


def _bars(name: str, title: str, caption: str, axis: str, bars: Sequence[_Bar]) -> Drawing | None:
    """Draw horizontal bars. The text is inside long bars and to the right of short ones."""
    most = max((size for *_, size, _ in bars), default=0)
    if not most > 0:
        return None
    power = min(max(int(math.log2(most)) // 10, 1), 3)
    figure, axes = row_figure([label for label, *_ in bars])
    for place, (_, color, size, text) in enumerate(bars):
        length, inside = size / 2 ** (10 * power), size > 0.55 * most
        axes.barh(place, length, height=0.62, color=color)
        axes.annotate(
            text,
            (length, place),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            color="white" if inside and is_dark(color) else INK,
            fontsize=8.5,
        )
    unit = ("KiB", "MiB", "GiB")[power - 1]
    axes.set(xlim=(0, 1.04 * most / 2 ** (10 * power)), xlabel=f"{axis}, {unit}")
    words = ", ".join(f"{label} {text}" for label, _, _, text in bars)
    return Drawing(name, title, caption, f"Bars of {title.lower()}: {words}.", to_png(figure))


def time_figure(compared: Sequence[Outcome]) -> Drawing | None:
    """Draw box plots of step times, with medians and means."""
    rows = []
    for outcome in compared:
        times = [time for run in outcome.counted for time in run.step_ms if time > 0]
        if times:
            rows.append((outcome, times))
    if not rows:
        return None
    figure, axes = row_figure([outcome.full_label for outcome, _ in rows])
    low, high = min(min(times) for _, times in rows), max(max(times) for _, times in rows)
    log_scale(axes, "x", within=high / low < 100)
    for place, (outcome, times) in enumerate(rows):
        color = outcome.color
        axes.boxplot(
            times,
            positions=[place],
            orientation="horizontal",
            widths=0.5,
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": color, "edgecolor": color},
            medianprops={"color": "white" if is_dark(color) else "black", "linewidth": 1.6},
            whiskerprops={"color": color},
            capprops={"color": color},
            flierprops={"marker": "|", "markeredgecolor": color, "alpha": 0.55},
        )
    for right, name in _TIME_COLUMNS:
        means = [outcome.number(f"step_ms.{name}") for outcome, _ in rows]
        texts = [name, *("" if mean is None else time_text(mean) for mean in means)]
        for place, text in zip((-0.6, *range(len(rows))), texts, strict=True):
            axes.annotate(
                text,
                (1, place),
                xycoords=axes.get_yaxis_transform(),
                xytext=(right, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8.5,
            )
    axes.set(xlim=(low / 1.15, high * 1.15), xlabel="milliseconds per step")
    return Drawing(
        "step_time",
        "Time per step",
        "Boxes: the middle half of the steps. Ticks outside: single steps, which update or refresh"
        " the preconditioners or are the first ones. They are part of the mean.",
        "Box plots of step times; medians in ms: "
        + in_words(compared, "step_ms.median", time_text),
        to_png(figure),
    )
