"""The figures of a report: one color per optimizer, and seeds as a mean with a band."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kronbit.lab.report import drawing, numbers
from kronbit.lab.report.curves import Curve, curve
from kronbit.lab.report.outcomes import Column, Outcome, find

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EARLY = 0.1  # fraction of steps that are cut off: their losses would flatten all later ones
_LATE = 0.25  # fraction of steps before the close-up
_BESIDE: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}  # for annotate()
# Parts of the memory of an optimizer: key in the summary, name and color.
PARTS = (
    ("parameters", "parameters", drawing.GREY),
    ("gradients", "gradients", drawing.GREY),
    ("base", "base's state", drawing.GREY),
    ("statistics", "statistics", drawing.ORANGE),
    ("roots", "inverse roots", drawing.ORANGE),
)

_Axis = Literal["steps", "seconds"]


class _Line(NamedTuple):
    """A curve in a figure. A thin line is smoothed, in the background and without a band."""

    outcome: Outcome
    curve: Curve
    thin: bool = False


# Sets the limits and scales of axes with lines, and returns an addition to the caption.
_Frame = Callable[["Axes", Sequence[_Line]], str | None]
# A bar: its label, its color, its length in bytes if it is known, and a note on it.
_Bar = tuple[str, str, float | None, str]


def draw_figures(compared: Sequence[Outcome]) -> list[drawing.Drawing]:
    """Draw all figures for which the outcomes of a recipe have numbers."""
    import matplotlib as mpl

    compared = drawing.with_styles(compared)
    with mpl.rc_context(drawing.STYLE):
        drawn = [
            _losses(compared, "steps"),
            _losses(compared, "seconds"),
            _draw(
                "validation",
                "Validation loss, close up",
                "The same validation losses in detail.",
                Column("loss", "validation loss", numbers.loss_text),
                _lines(compared, "evals", "loss"),
                _frame_validation,
            ),
            _draw(
                "accuracy",
                "Validation accuracy, close up",
                "Fraction of held-out examples that are classified correctly.",
                Column("accuracy", "validation accuracy", numbers.percent_text),
                _lines(compared, "evals", "accuracy"),
                _frame_accuracy,
            ),
            *_memory(compared),
            _times(compared),
            _errors(compared, "nre", "normwise relative error", numbers.loss_text),
            _errors(compared, "angle", "angle, degrees", numbers.degrees_text),
        ]
    return [figure for figure in drawn if figure is not None]


def _losses(compared: Sequence[Outcome], axis: _Axis) -> drawing.Drawing | None:
    """Draw training and validation loss against steps or seconds."""
    lines = []
    for outcome in compared:
        lines.append(_Line(outcome, curve(outcome.counted, "train", "loss"), thin=True))
        lines.append(_Line(outcome, outcome.losses))
    domain = "steps" if axis == "steps" else "time"
    return _draw(
        f"loss_{axis}",
        f"Loss against {domain}",
        "Thin lines: training loss, smoothed. Bold lines: validation loss.",
        Column("loss", "loss (thin: training, bold: validation)", numbers.loss_text),
        lines,
        _frame_losses,
        axis,
        f"training and validation loss against {domain}; last validation losses",
    )


def _errors(
    compared: Sequence[Outcome], key: str, label: str, write: numbers.Write
) -> drawing.Drawing | None:
    """Draw an error of the stored inverse roots, compared with exact ones."""
    error = "relative error" if key == "nre" else key
    return _draw(
        f"error_{key}",
        f"Quantisation error: {error}",
        f"{error.capitalize()} of the stored inverse roots compared with exact ones; mean over "
        "the watched blocks.",
        Column(f"errors.{key}", label, write),
        _lines(compared, "errors", key),
        _frame_errors,
        words=f"the {error} of stored inverse roots; last values",
    )


def _lines(compared: Sequence[Outcome], kind: Literal["evals", "errors"], key: str) -> list[_Line]:
    """Return the curves of a number, without optimizers that have no such number."""
    lines = [_Line(outcome, curve(outcome.counted, kind, key)) for outcome in compared]
    return [line for line in lines if line.curve.steps]


def _draw(
    name: str,
    title: str,
    caption: str,
    number: Column,
    lines: Sequence[_Line],
    frame: _Frame,
    axis: _Axis = "steps",
    words: str = "",
) -> drawing.Drawing | None:
    """Draw lines, or return None if they have no points.

    The title of ``number`` is the label of the vertical axis. The alternative text begins with
    ``words``, or with this label, and lists the numbers. Explanations of bands and crosses are
    appended to the caption.
    """
    if not any(line.curve.steps for line in lines):
        return None
    compared = list(dict.fromkeys(line.outcome for line in lines))
    figure, axes = drawing.new_figure(compared)
    close_up = not any(line.thin for line in lines)
    for line in lines:
        _plot(axes, line, axis, close_up)
    caption += frame(axes, lines) or ""
    if any(len(outcome.counted) > 1 for outcome in compared):
        caption += " Mean over the seeds, with a band from the lowest to the highest."
    if any(line.curve.diverged for line in lines):
        caption += " A cross: the values are not finite from here on."
    for line in lines:
        _mark_diverged(axes, line, axis)
    axes.set(xlabel="step" if axis == "steps" else "seconds of training", ylabel=number.title)
    words = words or f"{number.title}; last values"
    alt = f"Lines of {words}: {drawing.in_words(compared, number)}"
    return drawing.Drawing(name, title, caption, alt, drawing.to_png(figure))


def _plot(axes: Axes, line: _Line, axis: _Axis, close_up: bool) -> None:
    """Draw a line up to the point where it diverges, with a band if there are several seeds.

    A close-up has narrower lines, and marks their points if there are few.
    """
    outcome, curve, thin = line
    x, end = getattr(curve, axis), curve.finite
    axes.plot(
        x[:end],
        (curve.smoothed() if thin else curve.mean)[:end],
        color=outcome.color,
        linewidth=0.8 if thin else 1.6 if close_up else 1.9,
        linestyle="-" if thin else outcome.style,
        alpha=0.65 if thin else 1,
        # A line through a single point is invisible.
        marker="o" if end == 1 or (close_up and end <= 12) else None,
        markersize=3,
        zorder=2 if thin else 3,
    )
    if not thin and len(outcome.counted) > 1:
        band = curve.low[:end], curve.high[:end]
        axes.fill_between(x[:end], *band, color=outcome.color, alpha=0.16, linewidth=0)


def _mark_diverged(axes: Axes, line: _Line, axis: _Axis) -> None:
    """Draw a cross at the last finite point of a curve that diverges, or at the edge of the axes.

    The limits of the axes must be set already. Without a finite point, the cross is halfway up.
    """
    curve = line.curve
    if not curve.diverged:
        return
    last = max(curve.finite - 1, 0)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    x = min(max(getattr(curve, axis)[last], left), right)
    y = min(max(curve.mean[last], low), high) if curve.finite else 0.5
    place = axes.transData if curve.finite else axes.get_xaxis_transform()
    look: Any = {"ms": 6 if line.thin else 9, "mfc": line.outcome.color, "mec": "white"}
    axes.plot(x, y, "X", clip_on=False, zorder=5, transform=place, **look)


def _frame_losses(axes: Axes, lines: Sequence[_Line]) -> None:
    """Cut off the first losses; use a logarithmic scale if the range is wide."""
    low, high = math.inf, -math.inf
    for _, losses, _ in lines:
        values = losses.mean[: losses.finite]
        if values:
            points = zip(losses.steps, values, strict=False)
            late = [value for step, value in points if step >= _EARLY * losses.steps[-1]]
            low = min(low, *values)
            high = max(high, min(max(late or values), max(values[0], 2 * min(values))))
    if high > 15 * low > 0:
        drawing.log_scale(axes)
        axes.set_ylim(low / 1.15, high * 1.15)
    elif low <= high:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_ylim(low - room, high + room)


def _frame_validation(axes: Axes, lines: Sequence[_Line]) -> str | None:
    """Show the later part of training, the base's last loss and where other optimizers reach it."""
    base = find([line.outcome for line in lines], "base")
    if len(lines) == 1 or base is None:
        _frame_late(axes, lines)
        return None
    final, first = base.losses.mean[-1], math.inf
    if math.isfinite(final):
        axes.axhline(final, color=drawing.INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    for outcome, losses, _ in lines:
        step = losses.first_at_most(final) if math.isfinite(final) else None
        if outcome is base or step is None:
            continue
        first = min(first, step)
        value = losses.mean[losses.steps.index(step)]
        axes.plot(step, value, "o", ms=7.5, mfc="none", mec=outcome.color, mew=1.4, zorder=4)
    _frame_late(axes, lines, start=0.8 * first)
    return f" Dashed: the last loss of {base.label}; rings: first points at which others reach it."


def _frame_accuracy(axes: Axes, lines: Sequence[_Line]) -> None:
    """Show the later part of training, with percentages."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    _frame_late(axes, lines, low=False)


def _frame_late(
    axes: Axes, lines: Sequence[_Line], low: bool = True, start: float = math.inf
) -> None:
    """Show the later part of curves in detail, from ``start`` or an earlier step.

    ``low`` is True if low values are good.
    """
    curves = [line.curve for line in lines]
    last = max(curve.steps[-1] for curve in curves)
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


def _frame_errors(axes: Axes, lines: Sequence[_Line]) -> None:
    """Start the axis at zero, or make it logarithmic if the errors differ by more than 8 times."""
    values = [value for line in lines for value in line.curve.mean if math.isfinite(value)]
    if values and max(values) > 8 * min(values) > 0:
        drawing.log_scale(axes)
    elif values:
        axes.set_ylim(0, 1.1 * max(values) or 1)


def _memory(compared: Sequence[Outcome]) -> list[drawing.Drawing | None]:
    """Draw second-order state and peak memory, or all parts of the memory of a single optimizer."""
    kind = peak_kind(compared)
    if len(compared) == 1:
        parts = (*PARTS, ("peak", f"peak, {kind}" if kind else "peak", drawing.INK))
        sizes = [(name, color, compared[0].number(f"memory.{k}"), "") for k, name, color in parts]
        caption = "Memory held between steps, and the largest amount during training."
        return [_bars("memory", "Memory", caption, "memory", sizes)]
    states, peaks = [], []
    for outcome in compared:
        of_32, look = outcome.number("of_32"), (outcome.full_label, outcome.color)
        smaller = of_32 is not None and of_32 < 1
        note = f", {numbers.share_text(of_32)} of 32-bit" if smaller else ""
        states.append((*look, outcome.number("state"), note))
        peaks.append((*look, outcome.number("memory.peak"), ""))
    caption = "Statistics and inverse roots, as stored between steps."
    largest = f"The largest amount of memory during training{kind and f': {kind}'}."
    return [
        _bars("state", "Second-order state", caption, "statistics and inverse roots", states),
        _bars("peak", "Peak memory", largest, kind or "peak memory", peaks),
    ]


def peak_kind(compared: Sequence[Outcome]) -> str:
    """Describe how peak memory was measured."""
    runs = [run for outcome in compared for run in outcome.counted]
    kinds = [(run.summary.get("memory") or {}).get("peak_is") for run in runs]
    return ", ".join(dict.fromkeys(str(kind) for kind in kinds if kind))


def _bars(
    name: str, title: str, caption: str, axis: str, sizes: Sequence[_Bar]
) -> drawing.Drawing | None:
    """Draw horizontal bars. The text is inside long bars and to the right of short ones."""
    bars = [
        (label, color, size, (numbers.bytes_text(size) if size else "none") + note)
        for label, color, size, note in sizes
        if size is not None
    ]
    most = max((size for *_, size, _ in bars), default=0)
    if not most > 0:
        return None
    power = min(max(int(math.log2(most)) // 10, 1), 3)
    figure, axes = drawing.row_figure([label for label, *_ in bars])
    for place, (_, color, size, text) in enumerate(bars):
        length, inside = size / 2 ** (10 * power), size > 0.55 * most
        right, align = (-5, "right") if inside else (5, "left")
        ink = "white" if inside and drawing.is_dark(color) else drawing.INK
        axes.barh(place, length, height=0.62, color=color)
        axes.annotate(text, (length, place), xytext=(right, 0), ha=align, color=ink, **_BESIDE)
    unit = ("KiB", "MiB", "GiB")[power - 1]
    axes.set(xlim=(0, 1.04 * most / 2 ** (10 * power)), xlabel=f"{axis}, {unit}")
    words = ", ".join(f"{label} {text}" for label, _, _, text in bars)
    return drawing.Drawing(
        name, title, caption, f"Bars of {title.lower()}: {words}.", drawing.to_png(figure)
    )


def _times(compared: Sequence[Outcome]) -> drawing.Drawing | None:
    """Draw box plots of step times, with medians and means."""
    measured = (
        (outcome, [time for run in outcome.counted for time in run.step_ms if time > 0])
        for outcome in compared
    )
    rows = [(outcome, times) for outcome, times in measured if times]
    if not rows:
        return None
    figure, axes = drawing.row_figure([outcome.full_label for outcome, _ in rows])
    low, high = min(min(times) for _, times in rows), max(max(times) for _, times in rows)
    drawing.log_scale(axes, "x", within=high / low < 100)
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
            medianprops={"color": "white" if drawing.is_dark(color) else "black", "linewidth": 1.6},
            whiskerprops={"color": color},
            capprops={"color": color},
            flierprops={"marker": "|", "markeredgecolor": color, "alpha": 0.55},
        )
    beside = {**_BESIDE, "xycoords": axes.get_yaxis_transform(), "ha": "right"}
    for right, name in ((36, "median"), (68, "mean")):  # columns at distances in points
        axes.annotate(name, (1, -0.6), xytext=(right, 0), **beside)
        for place, (outcome, _) in enumerate(rows):
            time = outcome.number(f"step_ms.{name}")
            text = "" if time is None else numbers.time_text(time)
            axes.annotate(text, (1, place), xytext=(right, 0), **beside)
    axes.set(xlim=(low / 1.15, high * 1.15), xlabel="milliseconds per step")
    return drawing.Drawing(
        "step_time",
        "Time per step",
        "Boxes: the middle half of the steps. Ticks outside: single steps, such as those"
        " that update or refresh preconditioners, and the first ones. The mean includes them.",
        "Box plots of step times; medians in ms: "
        + drawing.in_words(compared, Column("step_ms.median", "median", numbers.time_text)),
        drawing.to_png(figure),
    )
