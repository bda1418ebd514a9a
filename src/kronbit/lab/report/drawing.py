"""How the lab draws: a colour and a line for every optimizer, curves, bands, frames, legends."""

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
# Told apart by lightness and by line, too, not by hue alone: greys for what is compared with,
# blues for the paper's, orange for ours.
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
STYLE: Any = {  # of matplotlib's settings
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
_EARLY = 0.1  # of the steps: the fall at the start would flatten all that is of interest
_LATE = 0.25  # where the close-up begins

Axis = Literal["steps", "seconds"]


@dataclass(frozen=True)
class Drawing:
    """A figure of a report.

    Attributes:
        name: Of its file, without the suffix.
        title: What it shows.
        caption: How to read it.
        alt: Its content in words.
        png: The image.
    """

    name: str
    title: str
    caption: str
    alt: str
    png: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, as the first bytes of a PNG say them."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height

    @property
    def base64(self) -> str:
        """The image as text, for a page that contains it."""
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Line:
    """An optimizer as it is drawn.

    Attributes:
        outcome: What its runs came to.
        colour: As ``#rrggbb``.
        style: Of matplotlib's line styles.
    """

    outcome: Outcome
    colour: str
    style: Any


def optimizer_lines(found: Sequence[Outcome]) -> list[Line]:
    """A colour and a line for every optimizer, the known ones always the same.

    Args:
        found: The outcomes of one recipe.
    """
    known, others = dict(KNOWN), itertools.cycle(_OTHERS)
    # Of several outcomes of a known variant, the first has its colour.
    return [Line(outcome, *(known.pop(outcome.variant, None) or next(others))) for outcome in found]


def plot_curve(
    axes: Axes,
    line: Line,
    own: Curve,
    axis: Axis,
    values: Sequence[float],
    width: float,
    marked: bool = False,
) -> None:
    """A curve until it diverges, with a band if there are several seeds.

    Args:
        axes: Where to.
        line: Whose curve it is.
        own: The curve.
        axis: What to draw it against.
        values: Its means, or smoothed ones.
        width: Of the line; below 1 it stays in the background.
        marked: Whether its points show, if they are few.
    """
    x, end = getattr(own, axis), own.finite
    thin = width < 1
    axes.plot(
        x[:end],
        values[:end],
        color=line.colour,
        linewidth=width,
        linestyle="-" if thin else line.style,
        alpha=0.65 if thin else 1,
        # A single point has no line.
        marker="o" if end == 1 or (marked and end <= 12) else None,
        markersize=3,
        zorder=2 if thin else 3,
    )
    if not thin and len(line.outcome.counted) > 1:
        band = own.low[:end], own.high[:end]
        axes.fill_between(x[:end], *band, color=line.colour, alpha=0.16, linewidth=0)


def mark_diverged(axes: Axes, line: Line, own: Curve, axis: Axis, size: float = 9) -> None:
    """A cross at the last finite point of a curve that diverges, once the frame is known.

    Args:
        axes: Where the curve is drawn.
        line: Whose curve it is.
        own: The curve.
        axis: What it is drawn against.
        size: Of the cross, in points.
    """
    if not own.diverged:
        return
    last = max(own.finite - 1, 0)
    x = getattr(own, axis)[last]
    # What rose out of the frame has its cross at the edge, what was never finite at mid-height.
    y = own.mean[last] if own.finite else 0.5
    low, high = axes.get_ylim() if own.finite else (0, 1)
    left, right = axes.get_xlim()
    axes.plot(
        min(max(x, left), right),
        min(max(y, low), high),
        marker="X",
        markersize=size,
        markerfacecolor=line.colour,
        markeredgecolor="white",
        clip_on=False,
        zorder=5,
        transform=axes.transData if own.finite else axes.get_xaxis_transform(),
    )


def frame_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Leave out the fall at the start, and what rises above it; logarithmic if it is still long.

    Args:
        axes: Where the curves are drawn.
        curves: All of them.
    """
    low, high = math.inf, -math.inf
    for own in curves:
        values = own.mean[: own.finite]
        if values:
            points = zip(own.steps, values, strict=False)
            late = [value for step, value in points if step >= _EARLY * own.steps[-1]]
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
    """Show the later part of some curves, close up.

    Args:
        axes: Where they are drawn.
        curves: All of them.
        low: Whether low values are good.
        start: A step that must be seen.
    """
    last = max((own.steps[-1] for own in curves if own.steps), default=0)
    few = max(len(own.steps) for own in curves) <= 6
    start = 0 if few else min(_LATE * last, start)
    values = [
        value
        for own in curves
        for step, *both in zip(own.steps[: own.finite], own.low, own.high, strict=False)
        for value in both
        if step >= start
    ]
    if not values:
        return
    # A curve that goes wrong in the end must not flatten all others.
    middle = sorted(values)[len(values) // 2]
    best, worst = (min(values), max(values)) if low else (max(values), min(values))
    if abs(worst - best) > 6 * abs(middle - best) > 0:
        worst = best + 6 * (middle - best)
    room = 0.06 * abs(worst - best) or 0.05 * abs(best) or 1
    axes.set_ylim(min(best, worst) - room, max(best, worst) + room)
    axes.set_xlim(start, last + 0.02 * (last - start) or 1)


def log_scale(axes: Axes, which: Literal["x", "y"] = "y", within: bool = True) -> None:
    """Make an axis logarithmic, with plain numbers.

    Args:
        axes: Whose axis.
        which: The horizontal or the vertical one.
        within: Whether 2 and 5 are written, too: 1, 10 and 100 alone may be too few to read by.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if within else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def new_figure(lines: Sequence[Line]) -> tuple[Figure, Axes]:
    """A figure that names the optimizers above itself, where no curve is.

    Args:
        lines: What will be drawn in it.
    """
    from matplotlib.lines import Line2D

    labels = [wrapped(line.outcome.full_label) for line in lines]
    figure, axes = _sized(_HEIGHT + 0.09 * sum(label.count("\n") + 1 for label in labels))
    figure.legend(
        [Line2D([], [], color=line.colour, linestyle=line.style, linewidth=1.9) for line in lines],
        labels,
        loc="outside upper left",
        ncols=1 if len(lines) == 1 else 2,
        fontsize=8.5,
    )
    return figure, axes


def row_figure(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with named rows, from the top.

    Args:
        labels: Their names.
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
    """The label in lines that fit, as matplotlib takes it.

    Args:
        label: What to write.
        width: The most letters in a line.
    """
    return textwrap.fill(label.replace("$", r"\$"), width)


def is_dark(colour: str) -> bool:
    """Whether white can be read on it.

    Args:
        colour: As ``#rrggbb``.
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 130


def to_png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file.

    Args:
        figure: What to draw.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=_DPI, format="png")
    return buffer.getvalue()


def notes(lines: Sequence[Line], curves: Sequence[Curve]) -> str:
    """What a caption says of several seeds, and of curves that diverge.

    Args:
        lines: What the figure shows.
        curves: And its curves.
    """
    found = ""
    if any(len(line.outcome.counted) > 1 for line in lines):
        found += " Mean over the seeds, and a band from the lowest to the highest."
    if any(own.diverged for own in curves):
        found += " A cross: from here on it is not a finite number."
    return found


def in_words(lines: Sequence[Line], write: Write, *path: str) -> str:
    """The numbers of a figure, for who does not see it.

    Args:
        lines: What the figure shows.
        write: How numbers are written.
        *path: Where they are in the summaries.
    """
    told = [
        f"{line.outcome.full_label} {spread.text(write)}"
        for line in lines
        if (spread := line.outcome.spread(*path)) is not None
    ]
    return (", ".join(told) or "unknown") + "."
