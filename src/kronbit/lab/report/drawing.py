"""Drawing with matplotlib: colors and line styles of optimizers, curves, axis limits, legends."""

from __future__ import annotations

import base64
import io
import itertools
import math
import struct
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kronbit.lab.report.curves import Curve
from kronbit.lab.report.numbers import Write
from kronbit.lab.report.outcomes import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, AXIS, GREY, ORANGE = "#2b3038", "#5c6370", "#8a8f98", "#e08a3c"
BLUE, PALE_BLUE = "#3b6ea8", "#8ab6e0"
DASHED, DOTTED = (0, (5, 1.5)), (0, (1.2, 1.2))
# Colors differ in lightness, and lines in style, not in hue alone. References are grey, the
# paper's variants blue, this library's default orange.
KNOWN: dict[str, tuple[str, Any]] = {
    "base": (INK, "-"),
    "shampoo-32": (GREY, DASHED),
    "shampoo-4-naive": (PALE_BLUE, DOTTED),
    "shampoo-4-paper": (BLUE, "-"),
    "shampoo-4": (ORANGE, "-"),
}
_OTHERS: tuple[tuple[str, Any], ...] = (
    ("#12806a", "-"),
    ("#a64d79", "-"),
    ("#b59a1f", DASHED),
    ("#6750a4", "-"),
    ("#5fbfa8", DOTTED),
    ("#8c4a2f", DASHED),
)
STYLE: Any = {  # matplotlib's rcParams
    "font.size": 9,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": AXIS,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.7,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "savefig.facecolor": "white",
}
_WIDTH, _HEIGHT, _DPI = 5.2, 3.3, 200
_EARLY = 0.1  # fraction of steps that are cut off: their losses would flatten all later ones
_LATE = 0.25  # fraction of steps before the close-up

Axis = Literal["steps", "seconds"]


@dataclass(frozen=True)
class Drawing:
    """A figure of a report.

    Attributes:
        name: File name without suffix.
        title: Title of the figure.
        caption: Caption of the figure.
        alt: Alternative text: the content in words.
        png: Content of the PNG file.
    """

    name: str
    title: str
    caption: str
    alt: str
    png: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, read from the header of the PNG."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height

    @property
    def base64(self) -> str:
        """The PNG in base64, to be embedded in a page."""
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class LegendEntry:
    """An optimizer with its color and line style.

    Attributes:
        outcome: Outcome of the optimizer.
        color: Color as ``#rrggbb``.
        style: Line style of matplotlib.
    """

    outcome: Outcome
    color: str
    style: Any


def legend_entries(compared: Sequence[Outcome]) -> list[LegendEntry]:
    """Assign colors and line styles. Known variants look the same in all figures.

    Args:
        compared: Outcomes of one recipe.
    """
    known, others = dict(KNOWN), itertools.cycle(_OTHERS)
    # If several outcomes have a known variant, the first one takes its color.
    entries = []
    for outcome in compared:
        color, style = known.pop(outcome.variant) if outcome.variant in known else next(others)
        entries.append(LegendEntry(outcome, color, style))
    return entries


def plot_curve(
    axes: Axes,
    entry: LegendEntry,
    curve: Curve,
    axis: Axis,
    values: Sequence[float],
    width: float,
    marked: bool = False,
) -> None:
    """Draw a curve up to the point where it diverges, with a band if there are several seeds.

    Args:
        axes: Axes to draw in.
        entry: Optimizer of the curve.
        curve: The curve.
        axis: Quantity on the horizontal axis.
        values: Means of the curve, or smoothed means.
        width: Width of the line. A line thinner than 1 is drawn in the background, without a band.
        marked: True if points are marked when there are few.
    """
    x, end = getattr(curve, axis), curve.finite
    thin = width < 1
    axes.plot(
        x[:end],
        values[:end],
        color=entry.color,
        linewidth=width,
        linestyle="-" if thin else entry.style,
        alpha=0.65 if thin else 1,
        # A line through a single point is invisible.
        marker="o" if end == 1 or (marked and end <= 12) else None,
        markersize=3,
        zorder=2 if thin else 3,
    )
    if not thin and len(entry.outcome.counted) > 1:
        band = curve.low[:end], curve.high[:end]
        axes.fill_between(x[:end], *band, color=entry.color, alpha=0.16, linewidth=0)


def mark_diverged(
    axes: Axes, entry: LegendEntry, curve: Curve, axis: Axis, size: float = 9
) -> None:
    """Draw a cross at the last finite point of a curve that diverges.

    The limits of the axes must be set already.

    Args:
        axes: Axes of the curve.
        entry: Optimizer of the curve.
        curve: The curve.
        axis: Quantity on the horizontal axis.
        size: Size of the cross in points.
    """
    if not curve.diverged:
        return
    last = max(curve.finite - 1, 0)
    x = getattr(curve, axis)[last]
    # The cross of a curve that left the axes is at their edge; without a finite point, halfway up.
    y = curve.mean[last] if curve.finite else 0.5
    low, high = axes.get_ylim() if curve.finite else (0, 1)
    left, right = axes.get_xlim()
    axes.plot(
        min(max(x, left), right),
        min(max(y, low), high),
        marker="X",
        markersize=size,
        markerfacecolor=entry.color,
        markeredgecolor="white",
        clip_on=False,
        zorder=5,
        transform=axes.transData if curve.finite else axes.get_xaxis_transform(),
    )


def frame_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Set limits that cut off the first losses; use a logarithmic scale if the range is wide.

    Args:
        axes: Axes of the curves.
        curves: All curves.
    """
    low, high = math.inf, -math.inf
    for curve in curves:
        values = curve.mean[: curve.finite]
        if values:
            points = zip(curve.steps, values, strict=False)
            late = [value for step, value in points if step >= _EARLY * curve.steps[-1]]
            low = min(low, *values)
            high = max(high, min(max(late or values), max(values[0], 2 * min(values))))
    if low > high:
        return
    if low > 0 and high > 15 * low:
        log_scale(axes)
        axes.set_ylim(low / 1.15, high * 1.15)
    else:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_ylim(low - room, high + room)


def frame_late(axes: Axes, curves: Sequence[Curve], low: bool, start: float = math.inf) -> None:
    """Set limits that show the later part of curves in detail.

    Args:
        axes: Axes of the curves.
        curves: All curves.
        low: True if low values are good.
        start: Step that must be visible.
    """
    last = max((curve.steps[-1] for curve in curves if curve.steps), default=0)
    few = max(len(curve.steps) for curve in curves) <= 6
    start = 0 if few else min(_LATE * last, start)
    values = [
        value
        for curve in curves
        for step, *band in zip(curve.steps[: curve.finite], curve.low, curve.high, strict=False)
        for value in band
        if step >= start
    ]
    if not values:
        return
    # A curve that deteriorates at the end must not flatten the others.
    middle = sorted(values)[len(values) // 2]
    best, worst = (min(values), max(values)) if low else (max(values), min(values))
    if abs(worst - best) > 6 * abs(middle - best) > 0:
        worst = best + 6 * (middle - best)
    room = 0.06 * abs(worst - best) or 0.05 * abs(best) or 1
    axes.set_ylim(min(best, worst) - room, max(best, worst) + room)
    axes.set_xlim(start, last + 0.02 * (last - start) or 1)


def log_scale(axes: Axes, which: Literal["x", "y"] = "y", within: bool = True) -> None:
    """Make an axis logarithmic, with plain numbers as labels.

    Args:
        axes: Axes to change.
        which: The horizontal or the vertical axis.
        within: True if 2 and 5 are labelled, too, as powers of ten alone may be too few.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if within else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def new_figure(entries: Sequence[LegendEntry]) -> tuple[Figure, Axes]:
    """Create a figure with a legend above the axes.

    Args:
        entries: Optimizers in the legend.
    """
    from matplotlib.lines import Line2D

    labels = [wrapped(entry.outcome.full_label) for entry in entries]
    figure, axes = _sized(_HEIGHT + 0.09 * sum(label.count("\n") + 1 for label in labels))
    looks = [{"color": entry.color, "linestyle": entry.style} for entry in entries]
    figure.legend(
        [Line2D([], [], linewidth=1.9, **look) for look in looks],
        labels,
        loc="outside upper left",
        ncols=1 if len(entries) == 1 else 2,
        fontsize=8.5,
    )
    return figure, axes


def row_figure(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Create a figure with labelled rows, the first one at the top.

    Args:
        labels: Labels of the rows.
    """
    figure, axes = _sized(max(2.0, 1.0 + 0.48 * len(labels)))
    axes.set_yticks(range(len(labels)), [wrapped(label, 18) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _sized(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def wrapped(label: str, width: int = 28) -> str:
    """Break a label into lines, and escape it for matplotlib.

    Args:
        label: The label.
        width: Largest number of characters in a line.
    """
    return textwrap.fill(label.replace("$", r"\$"), width)


def is_dark(color: str) -> bool:
    """True if white text is legible on a color.

    Args:
        color: Color as ``#rrggbb``.
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 130


def to_png(figure: Figure) -> bytes:
    """Render a figure as PNG.

    Args:
        figure: The figure.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=_DPI, format="png")
    return buffer.getvalue()


def notes(entries: Sequence[LegendEntry], curves: Sequence[Curve]) -> str:
    """Explain bands and crosses, if the figure has any, for its caption.

    Args:
        entries: Optimizers in the figure.
        curves: Curves in the figure.
    """
    text = ""
    if any(len(entry.outcome.counted) > 1 for entry in entries):
        text += " Mean over the seeds, with a band from the lowest to the highest."
    if any(curve.diverged for curve in curves):
        text += " A cross: the values are not finite from here on."
    return text


def in_words(entries: Sequence[LegendEntry], write: Write, *path: str) -> str:
    """List the numbers of a figure, for its alternative text.

    Args:
        entries: Optimizers in the figure.
        write: Format of the numbers.
        *path: Path of the numbers in the summaries.
    """
    numbers = [
        f"{entry.outcome.full_label} {spread.text(write)}"
        for entry in entries
        if (spread := entry.outcome.spread(*path)) is not None
    ]
    return (", ".join(numbers) or "unknown") + "."
