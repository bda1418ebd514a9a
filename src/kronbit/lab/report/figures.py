"""The figures of a report: one colour per optimizer, several seeds as a mean with a band."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from kronbit.lab.report.cost_figures import memory_figures, time_figure
from kronbit.lab.report.curves import Curve, curve
from kronbit.lab.report.drawing import (
    INK,
    STYLE,
    Axis,
    Drawing,
    Line,
    frame_late,
    frame_losses,
    in_words,
    log_scale,
    mark_diverged,
    new_figure,
    notes,
    optimizer_lines,
    plot_curve,
    to_png,
)
from kronbit.lab.report.numbers import Write, degrees_text, loss_text, percent_text
from kronbit.lab.report.outcomes import Outcome, find

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Sets the frame of some curves, and says what else it has drawn, for the caption.
_Frame = Callable[["Axes", Sequence[Line], Sequence[Curve]], str]


def draw_figures(found: Sequence[Outcome]) -> list[Drawing]:
    """All figures that there are numbers for.

    Args:
        found: The outcomes of one recipe.
    """
    import matplotlib as mpl

    lines = optimizer_lines(found)
    with mpl.rc_context(STYLE):
        drawn = [
            _losses(lines, "steps"),
            _losses(lines, "seconds"),
            _over_steps(
                lines,
                "validation",
                "Validation loss, close up",
                "The same validation losses, close up.",
                "validation loss",
                ("loss",),
                loss_text,
                _frame_validation,
            ),
            _over_steps(
                lines,
                "accuracy",
                "Validation accuracy, close up",
                "Share of held-out examples that are classified rightly.",
                "validation accuracy",
                ("accuracy",),
                percent_text,
                _frame_accuracy,
            ),
            *memory_figures(lines),
            time_figure(lines),
            _errors(lines, "nre", "relative error", "normwise relative error", loss_text),
            _errors(lines, "angle", "angle", "angle, degrees", degrees_text),
        ]
    return [drawing for drawing in drawn if drawing is not None]


def _losses(lines: Sequence[Line], axis: Axis) -> Drawing | None:
    """Training and validation loss against steps or seconds."""
    pairs = [(line, curve(line.outcome.counted, "train", "loss")) for line in lines]
    curves = [own for line, train in pairs for own in (train, line.outcome.losses)]
    if not any(own.steps for own in curves):
        return None
    figure, axes = new_figure(lines)
    for line, train in pairs:
        plot_curve(axes, line, train, axis, train.smoothed(), width=0.8)
        plot_curve(axes, line, line.outcome.losses, axis, line.outcome.losses.mean, width=1.9)
    frame_losses(axes, curves)
    for line, train in pairs:
        mark_diverged(axes, line, train, axis, size=6)
        mark_diverged(axes, line, line.outcome.losses, axis)
    what, label = ("steps", "step") if axis == "steps" else ("time", "seconds of training")
    axes.set(xlabel=label, ylabel="loss (thin: training, bold: validation)")
    return Drawing(
        f"loss_{axis}",
        f"Loss against {what}",
        "Thin lines: training loss, smoothed. Bold lines: validation loss." + notes(lines, curves),
        f"Lines of training and validation loss against {what}; last validation losses: "
        + in_words(lines, loss_text, "loss"),
        to_png(figure),
    )


def _errors(lines: Sequence[Line], key: str, what: str, label: str, write: Write) -> Drawing | None:
    """The error of stored inverse roots against exact ones."""
    return _over_steps(
        lines,
        f"error_{key}",
        f"Quantisation error: {what}",
        f"{what.capitalize()} of the stored inverse roots against exact ones, mean over the "
        "watched blocks.",
        label,
        ("errors", key),
        write,
        _frame_errors,
        f"the {what} of stored inverse roots",
    )


def _over_steps(
    lines: Sequence[Line],
    name: str,
    title: str,
    caption: str,
    label: str,
    path: tuple[str, ...],
    write: Write,
    frame: _Frame,
    words: str = "",
) -> Drawing | None:
    """A number of evaluations or of watched roots, of the optimizers that have it.

    Args:
        lines: The optimizers.
        name: Of the file.
        title: Of the figure.
        caption: How to read it.
        label: Of the vertical axis.
        path: Where the last number is in a summary; its last key is that of the lines.
        write: How the number is written.
        frame: Sets the frame.
        words: What is drawn, for the alternative text; by default the label.
    """
    kind: Literal["evals", "errors"] = "errors" if path[0] == "errors" else "evals"
    pairs = [(line, curve(line.outcome.counted, kind, path[-1])) for line in lines]
    pairs = [(line, own) for line, own in pairs if own.steps]
    if not pairs:
        return None
    lines, curves = [line for line, _ in pairs], [own for _, own in pairs]
    figure, axes = new_figure(lines)
    for line, own in pairs:
        plot_curve(axes, line, own, "steps", own.mean, width=1.6, marked=True)
    caption += frame(axes, lines, curves) + notes(lines, curves)
    for line, own in pairs:
        mark_diverged(axes, line, own, "steps")
    axes.set(xlabel="step", ylabel=label)
    alt = f"Lines of {words or label}; last ones: {in_words(lines, write, *path)}"
    return Drawing(name, title, caption, alt, to_png(figure))


def _frame_validation(axes: Axes, lines: Sequence[Line], curves: Sequence[Curve]) -> str:
    """The later part, with the base's last loss and where others reach it."""
    base = find([line.outcome for line in lines], "base")
    if len(lines) == 1 or base is None:
        frame_late(axes, curves, low=True)
        return ""
    final, first = base.losses.mean[-1], math.inf
    if math.isfinite(final):
        axes.axhline(final, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    for line, own in zip(lines, curves, strict=True):
        step = own.first_at_most(final) if math.isfinite(final) else None
        if line.outcome is base or step is None:
            continue
        first = min(first, step)
        axes.plot(
            step,
            own.mean[own.steps.index(step)],
            marker="o",
            markersize=7.5,
            markerfacecolor="none",
            markeredgecolor=line.colour,
            markeredgewidth=1.4,
            zorder=4,
        )
    frame_late(axes, curves, low=True, start=0.8 * first)
    return f" Dashed: the last loss of {base.label}; rings where others first are as low."


def _frame_accuracy(axes: Axes, lines: Sequence[Line], curves: Sequence[Curve]) -> str:
    frame_late(axes, curves, low=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    return ""


def _frame_errors(axes: Axes, lines: Sequence[Line], curves: Sequence[Curve]) -> str:
    """From zero, or logarithmic if the errors differ much."""
    values = [value for own in curves for value in own.mean if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > 8 * min(values):
        log_scale(axes)
    elif values:
        axes.set_ylim(0, 1.1 * max(values) or 1)
    return ""
