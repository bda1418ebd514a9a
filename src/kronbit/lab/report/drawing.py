"""Drawing with matplotlib: styles of optimizers, figures and texts in them."""

from __future__ import annotations

import base64
import io
import itertools
import struct
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kronbit.lab.report.outcomes import Column, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, AXIS, GREY, ORANGE = "#2b3038", "#5c6370", "#8a8f98", "#e08a3c"
BLUE, PALE_BLUE = "#3b6ea8", "#8ab6e0"
DASHED, DOTTED = (0, (5, 1.5)), (0, (1.2, 1.2))
# Colors differ in lightness, not in hue alone, and lines also in style. References are grey, the
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
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), AXIS),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "font.size": 9,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.7,
    "legend.handlelength": 2.4,
    "savefig.facecolor": "white",
}
_WIDTH, _HEIGHT, _DPI = 5.2, 3.3, 200


@dataclass(frozen=True)
class Drawing:
    """A figure of a report, as the content of a PNG file."""

    name: str  # file name without suffix
    title: str
    caption: str
    alt: str  # alternative text: the content in words
    png: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, read from the header of the PNG."""
        return struct.unpack(">II", self.png[16:24])

    @property
    def base64(self) -> str:
        """The PNG in base64, to be embedded in a page."""
        return base64.b64encode(self.png).decode()


def with_styles(compared: Sequence[Outcome]) -> list[Outcome]:
    """Assign colors and line styles. Known variants look the same in all figures."""
    known: dict[str, Any] = {**KNOWN}
    others, styled = itertools.cycle(_OTHERS), []
    for outcome in compared:
        # If several outcomes have a known variant, the first one takes its color.
        color, style = known.pop(outcome.variant, None) or next(others)
        styled.append(replace(outcome, color=color, style=style))
    return styled


def log_scale(axes: Axes, which: Literal["x", "y"] = "y", within: bool = True) -> None:
    """Make an axis logarithmic, with plain numbers as labels.

    ``within`` labels 2 and 5, too, as powers of ten alone may be too few.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if within else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def new_figure(compared: Sequence[Outcome]) -> tuple[Figure, Axes]:
    """Create a figure with a legend above the axes."""
    from matplotlib.lines import Line2D

    labels = [_wrapped(outcome.full_label, 28) for outcome in compared]
    figure, axes = _sized(_HEIGHT + 0.09 * sum(label.count("\n") + 1 for label in labels))
    figure.legend(
        [Line2D([], [], linewidth=1.9, color=row.color, linestyle=row.style) for row in compared],
        labels,
        loc="outside upper left",
        ncols=1 if len(compared) == 1 else 2,
        fontsize=8.5,
    )
    return figure, axes


def row_figure(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Create a figure with labelled rows, the first one at the top."""
    figure, axes = _sized(max(2.0, 1.0 + 0.48 * len(labels)))
    label_rows(axes, [_wrapped(label, 18) for label in labels])
    return figure, axes


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Label the rows of axes, the first one at the top."""
    axes.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _sized(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _wrapped(label: str, width: int) -> str:
    """Break a label into lines, and escape it for matplotlib."""
    return textwrap.fill(label.replace("$", r"\$"), width)


def is_dark(color: str) -> bool:
    """True if white text is legible on a color, given as ``#rrggbb``."""
    red, green, blue = bytes.fromhex(color[1:])
    return 0.3 * red + 0.59 * green + 0.11 * blue < 130


def to_png(figure: Figure) -> bytes:
    """Render a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=_DPI, format="png")
    return buffer.getvalue()


def in_words(compared: Sequence[Outcome], number: Column) -> str:
    """List the numbers of a figure, for its alternative text."""
    known = [row for row in compared if row.number(number.key) is not None]
    words = [f"{row.full_label} {row.text(number.key, number.write)}" for row in known]
    return f"{', '.join(words) or 'unknown'}."
