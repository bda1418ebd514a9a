"""The figures of a report: one color per optimizer, and seeds as a mean with a band."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from kronbit.lab.report.cost_figures import memory_figures, time_figure
from kronbit.lab.report.curves import Curve, curve
from kronbit.lab.report.drawing import (
    INK,
    STYLE,
    Drawing,
    in_words,
    log_scale,
    new_figure,
    to_png,
    with_styles,
)
from kronbit.lab.report.numbers import Write, degrees_text, loss_text, percent_text
from kronbit.lab.report.outcomes import Outcome, find

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EARLY = 0.1  # fraction of steps that are cut off: their losses would flatten all later ones
_LATE = 0.25  # fraction of steps before the close-up

_Axis = Literal["steps", "seconds"]


class _Line(NamedTuple):
    """A curve in a figure. A thin line is smoothed, in the background and without a band."""

    outcome: Outcome
    curve: Curve
    thin: bool = False


# Sets the limits and scales of axes with lines, and returns an addition to the caption.
_Frame = Callable[["Axes", Sequence[_Line]], str]


def draw_figures(compared: Sequence[Outcome]) -> list[Drawing]:
    """Draw all figures for which the outcomes of a recipe have numbers."""
    import matplotlib as mpl

    compared = with_styles(compared)
    with mpl.rc_context(STYLE):
        drawn = [
            _losses(compared, "steps"),
            _losses(compared, "seconds"),
            _draw(
                "validation",
                "Validation loss, close up",
                "The same validation losses in detail.",
                "validation loss",
                _lines(compared, "evals", "loss"),
                "loss",
                loss_text,
                _frame_validation,
            ),
            _draw(
                "accuracy",
                "Validation accuracy, close up",
                "Fraction of held-out examples that are classified correctly.",
                "validation accuracy",
                _lines(compared, "evals", "accuracy"),
                "accuracy",
                percent_text,
                _frame_accuracy,
            ),
            *memory_figures(compared),
            time_figure(compared),
            _errors(compared, "nre", "relative error", "normwise relative error", loss_text),
            _errors(compared, "angle", "angle", "angle, degrees", degrees_text),
        ]
    return [drawing for drawing in drawn if drawing is not None]


def _losses(compared: Sequence[Outcome], axis: _Axis) -> Drawing | None:
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
        "loss (thin: training, bold: validation)",
        lines,
        "loss",
        loss_text,
        _frame_losses,
        axis,
        f"training and validation loss against {domain}; last validation losses",
    )


def _errors(
    compared: Sequence[Outcome], key: str, error: str, label: str, write: Write
) -> Drawing | None:
    """Draw an error of the stored inverse roots, compared with exact ones."""
    return _draw(
        f"error_{key}",
        f"Quantisation error: {error}",
        f"{error.capitalize()} of the stored inverse roots compared with exact ones; mean over "
        "the watched blocks.",
        label,
        _lines(compared, "errors", key),
        f"errors.{key}",
        write,
        _frame_errors,
        words=f"the {error} of stored inverse roots; last ones",
    )


def _lines(compared: Sequence[Outcome], kind: Literal["evals", "errors"], key: str) -> list[_Line]:
    """Return the curves of a number, without optimizers that have no such number."""
    lines = [_Line(outcome, curve(outcome.counted, kind, key)) for outcome in compared]
    return [line for line in lines if line.curve.steps]


def _draw(
    name: str,
    title: str,
    caption: str,
    label: str,
    lines: Sequence[_Line],
    key: str,
    write: Write,
    frame: _Frame,
    axis: _Axis = "steps",
    words: str = "",
) -> Drawing | None:
    """Draw lines, or return None if they have no points.

    Args:
        name: File name without suffix.
        title: Title of the figure.
        caption: Caption of the figure, without explanations of bands and crosses.
        label: Label of the vertical axis.
        lines: The lines.
        key: Key of the number in the summary, for the alternative text.
        write: Format of that number.
        frame: Function that sets limits and scales.
        axis: Quantity on the horizontal axis.
        words: Beginning of the alternative text. Default: the label.
    """
    if not any(line.curve.steps for line in lines):
        return None
    compared = list(dict.fromkeys(line.outcome for line in lines))
    figure, axes = new_figure(compared)
    close_up = not any(line.thin for line in lines)
    for line in lines:
        _plot(axes, line, axis, close_up)
    caption += frame(axes, lines)
    if any(len(outcome.counted) > 1 for outcome in compared):
        caption += " Mean over the seeds, with a band from the lowest to the highest."
    if any(line.curve.diverged for line in lines):
        caption += " A cross: the values are not finite from here on."
    for line in lines:
        _mark_diverged(axes, line, axis)
    axes.set(xlabel="step" if axis == "steps" else "seconds of training", ylabel=label)
    alt = f"Lines of {words or f'{label}; last ones'}: {in_words(compared, key, write)}"
    return Drawing(name, title, caption, alt, to_png(figure))


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
    """Draw a cross at the last finite point of a curve that diverges.

    The limits of the axes must be set already. The cross of a curve that left the axes is at their
    edge; without a finite point, it is halfway up.
    """
    curve = line.curve
    if not curve.diverged:
        return
    last = max(curve.finite - 1, 0)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.plot(
        min(max(getattr(curve, axis)[last], left), right),
        min(max(curve.mean[last], low), high) if curve.finite else 0.5,
        marker="X",
        markersize=6 if line.thin else 9,
        markerfacecolor=line.outcome.color,
        markeredgecolor="white",
        clip_on=False,
        zorder=5,
        transform=axes.transData if curve.finite else axes.get_xaxis_transform(),
    )


def _frame_losses(axes: Axes, lines: Sequence[_Line]) -> str:
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
        log_scale(axes)
        axes.set_ylim(low / 1.15, high * 1.15)
    elif low <= high:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_ylim(low - room, high + room)
    return ""


def _frame_validation(axes: Axes, lines: Sequence[_Line]) -> str:
    """Show the later part of training, the base's last loss and where other optimizers reach it."""
    base = find([line.outcome for line in lines], "base")
    if len(lines) == 1 or base is None:
        return _frame_late(axes, lines, low=True)
    final, first = base.losses.mean[-1], math.inf
    if math.isfinite(final):
        axes.axhline(final, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    for outcome, losses, _ in lines:
        step = losses.first_at_most(final) if math.isfinite(final) else None
        if outcome is base or step is None:
            continue
        first = min(first, step)
        axes.plot(
            step,
            losses.mean[losses.steps.index(step)],
            marker="o",
            markersize=7.5,
            markerfacecolor="none",
            markeredgecolor=outcome.color,
            markeredgewidth=1.4,
            zorder=4,
        )
    _frame_late(axes, lines, low=True, start=0.8 * first)
    return f" Dashed: the last loss of {base.label}; rings: first points at which others reach it."


def _frame_accuracy(axes: Axes, lines: Sequence[_Line]) -> str:
    """Show the later part of training, with percentages."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    return _frame_late(axes, lines, low=False)


def _frame_late(axes: Axes, lines: Sequence[_Line], low: bool, start: float = math.inf) -> str:
    """Set limits that show the later part of curves in detail.

    Args:
        axes: Axes of the lines.
        lines: All lines.
        low: True if low values are good.
        start: Step that must be visible.
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
        return ""
    # A curve that deteriorates at the end must not flatten the others.
    middle = sorted(values)[len(values) // 2]
    best, worst = (min(values), max(values)) if low else (max(values), min(values))
    if abs(worst - best) > 6 * abs(middle - best) > 0:
        worst = best + 6 * (middle - best)
    room = 0.06 * abs(worst - best) or 0.05 * abs(best) or 1
    axes.set_ylim(min(best, worst) - room, max(best, worst) + room)
    axes.set_xlim(start, last + 0.02 * (last - start) or 1)
    return ""


def _frame_errors(axes: Axes, lines: Sequence[_Line]) -> str:
    """Start the axis at zero, or make it logarithmic if the errors differ by more than 8 times."""
    values = [value for line in lines for value in line.curve.mean if math.isfinite(value)]
    if values and max(values) > 8 * min(values) > 0:
        log_scale(axes)
    elif values:
        axes.set_ylim(0, 1.1 * max(values) or 1)
    return ""
