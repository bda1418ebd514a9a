"""The figures of a report: one colour per optimizer, several seeds as a mean with a band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kronbit.lab.report.cost_figures import memory_figures, time_figure
from kronbit.lab.report.curves import Curve, curve
from kronbit.lab.report.drawing import (
    STYLE,
    Axis,
    Drawing,
    Line,
    add_legend,
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
from kronbit.lab.report.numbers import degrees_text, loss_text, percent_text
from kronbit.lab.report.outcomes import Outcome, find

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
            _validation([line for line in lines if line.outcome.losses.steps]),
            _accuracy(lines),
            *memory_figures(lines),
            time_figure(lines),
            _errors(lines, "nre"),
            _errors(lines, "angle"),
        ]
    return [drawing for drawing in drawn if drawing is not None]


def _losses(lines: Sequence[Line], axis: Axis) -> Drawing | None:
    """Training and validation loss against steps or seconds."""
    trains = [curve(line.outcome.counted, "train", "loss") for line in lines]
    validations = [line.outcome.losses for line in lines]
    curves = [*trains, *validations]
    if not any(own.steps for own in curves):
        return None
    figure, axes = new_figure(lines)
    for line, train, validation in zip(lines, trains, validations, strict=True):
        plot_curve(axes, line, train, axis, train.smoothed(), width=0.8)
        plot_curve(axes, line, validation, axis, validation.mean, width=1.9)
    frame_losses(axes, curves)
    for line, train, validation in zip(lines, trains, validations, strict=True):
        mark_diverged(axes, line, train, axis, size=6)
        mark_diverged(axes, line, validation, axis)
    axes.set_ylabel("loss (thin: training, bold: validation)")
    axes.set_xlabel("step" if axis == "steps" else "seconds of training")
    add_legend(figure, lines)
    what = "steps" if axis == "steps" else "time"
    return Drawing(
        f"loss_{axis}",
        f"Loss against {what}",
        "Thin lines: training loss, smoothed. Bold lines: validation loss." + notes(lines, curves),
        f"Lines of training and validation loss against {what}; last validation losses: "
        + in_words(lines, lambda own: own.spread("loss"), loss_text),
        to_png(figure),
    )


def _validation(lines: Sequence[Line]) -> Drawing | None:
    """Validation loss in the later part, beside the base's last one."""
    if not lines:
        return None
    curves = [line.outcome.losses for line in lines]
    figure, axes = new_figure(lines)
    for line, own in zip(lines, curves, strict=True):
        plot_curve(axes, line, own, "steps", own.mean, width=1.6, marked=True)
    base = find([line.outcome for line in lines], "base")
    caption = "The same validation losses, close up."
    start = math.inf
    if len(lines) > 1 and base is not None and base.losses.mean:
        start = _mark_base(axes, lines, base)
        caption += f" Dashed: the last loss of {base.label}; rings where others first are as low."
    frame_late(axes, curves, low=True, start=0.8 * start)
    for line, own in zip(lines, curves, strict=True):
        mark_diverged(axes, line, own, "steps")
    axes.set_ylabel("validation loss")
    axes.set_xlabel("step")
    add_legend(figure, lines)
    return Drawing(
        "validation",
        "Validation loss, close up",
        caption + notes(lines, curves),
        "Lines of validation loss; last ones: "
        + in_words(lines, lambda own: own.spread("loss"), loss_text),
        to_png(figure),
    )


def _mark_base(axes: Axes, lines: Sequence[Line], base: Outcome) -> float:
    """Draw the base's last loss, and rings where others reach it; the first step of a ring."""
    final = base.losses.mean[-1]
    if not math.isfinite(final):
        return math.inf
    axes.axhline(final, color="#2b3038", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    first = math.inf
    for line in lines:
        own = line.outcome.losses
        step = own.first_at_most(final)
        if line.outcome is not base and step is not None:
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
    return first


def _accuracy(lines: Sequence[Line]) -> Drawing | None:
    pairs = _with_points(lines, "evals", "accuracy")
    if not pairs:
        return None
    shown = [line for line, _ in pairs]
    figure, axes = new_figure(shown)
    for line, own in pairs:
        plot_curve(axes, line, own, "steps", own.mean, width=1.6, marked=True)
    frame_late(axes, [own for _, own in pairs], low=False, start=math.inf)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.set_ylabel("validation accuracy")
    axes.set_xlabel("step")
    add_legend(figure, shown)
    return Drawing(
        "accuracy",
        "Validation accuracy, close up",
        "Share of held-out examples that are classified rightly."
        + notes(shown, [own for _, own in pairs]),
        "Lines of validation accuracy; last ones: "
        + in_words(shown, lambda own: own.spread("accuracy"), percent_text),
        to_png(figure),
    )


def _with_points(
    lines: Sequence[Line], kind: Literal["evals", "errors"], key: str
) -> list[tuple[Line, Curve]]:
    """The optimizers that have such a number, with its curve."""
    pairs = [(line, curve(line.outcome.counted, kind, key)) for line in lines]
    return [(line, own) for line, own in pairs if own.steps]


def _errors(lines: Sequence[Line], key: Literal["nre", "angle"]) -> Drawing | None:
    """The error of stored inverse roots against exact ones."""
    pairs = _with_points(lines, "errors", key)
    if not pairs:
        return None
    shown = [line for line, _ in pairs]
    figure, axes = new_figure(shown)
    for line, own in pairs:
        plot_curve(axes, line, own, "steps", own.mean, width=1.6, marked=True)
    values = [value for _, own in pairs for value in own.mean if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > 8 * min(values):
        log_scale(axes)
    elif values:
        axes.set_ylim(0, 1.1 * max(values) or 1)
    axes.set_xlabel("step")
    relative = key == "nre"
    axes.set_ylabel("normwise relative error" if relative else "angle, degrees")
    add_legend(figure, shown)
    title = "relative error" if relative else "angle"
    write = loss_text if relative else degrees_text
    return Drawing(
        f"error_{key}",
        f"Quantisation error: {title}",
        ("Relative error" if relative else "Angle")
        + " of the stored inverse roots against exact ones, mean over the watched blocks."
        + notes(shown, [own for _, own in pairs]),
        f"Lines of the {title} of stored inverse roots; last ones: "
        + in_words(shown, lambda own: own.spread("errors", key), write),
        to_png(figure),
    )
