"""The figures of a report: one color per optimizer, and seeds as a mean with a band."""

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
    LegendEntry,
    frame_late,
    frame_losses,
    in_words,
    legend_entries,
    log_scale,
    mark_diverged,
    new_figure,
    notes,
    plot_curve,
    to_png,
)
from kronbit.lab.report.numbers import Write, degrees_text, loss_text, percent_text
from kronbit.lab.report.outcomes import Outcome, find

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Sets the limits and scales of axes with curves, and returns an addition to the caption.
_Frame = Callable[["Axes", Sequence[LegendEntry], Sequence[Curve]], str]


def draw_figures(compared: Sequence[Outcome]) -> list[Drawing]:
    """Draw all figures for which the outcomes have numbers.

    Args:
        compared: Outcomes of one recipe.
    """
    import matplotlib as mpl

    entries = legend_entries(compared)
    with mpl.rc_context(STYLE):
        drawn = [
            _losses(entries, "steps"),
            _losses(entries, "seconds"),
            _over_steps(
                entries,
                "validation",
                "Validation loss, close up",
                "The same validation losses in detail.",
                "validation loss",
                ("loss",),
                loss_text,
                _frame_validation,
            ),
            _over_steps(
                entries,
                "accuracy",
                "Validation accuracy, close up",
                "Fraction of held-out examples that are classified correctly.",
                "validation accuracy",
                ("accuracy",),
                percent_text,
                _frame_accuracy,
            ),
            *memory_figures(entries),
            time_figure(entries),
            _errors(entries, "nre", "relative error", "normwise relative error", loss_text),
            _errors(entries, "angle", "angle", "angle, degrees", degrees_text),
        ]
    return [drawing for drawing in drawn if drawing is not None]


def _losses(entries: Sequence[LegendEntry], axis: Axis) -> Drawing | None:
    """Draw training and validation loss against steps or seconds."""
    pairs = [(entry, curve(entry.outcome.counted, "train", "loss")) for entry in entries]
    curves = [loss for entry, train in pairs for loss in (train, entry.outcome.losses)]
    if not any(loss.steps for loss in curves):
        return None
    figure, axes = new_figure(entries)
    for entry, train in pairs:
        plot_curve(axes, entry, train, axis, train.smoothed(), width=0.8)
        plot_curve(axes, entry, entry.outcome.losses, axis, entry.outcome.losses.mean, width=1.9)
    frame_losses(axes, curves)
    for entry, train in pairs:
        mark_diverged(axes, entry, train, axis, size=6)
        mark_diverged(axes, entry, entry.outcome.losses, axis)
    domain, label = ("steps", "step") if axis == "steps" else ("time", "seconds of training")
    axes.set(xlabel=label, ylabel="loss (thin: training, bold: validation)")
    return Drawing(
        f"loss_{axis}",
        f"Loss against {domain}",
        "Thin lines: training loss, smoothed. Bold lines: validation loss."
        + notes(entries, curves),
        f"Lines of training and validation loss against {domain}; last validation losses: "
        + in_words(entries, loss_text, "loss"),
        to_png(figure),
    )


def _errors(
    entries: Sequence[LegendEntry], key: str, error: str, label: str, write: Write
) -> Drawing | None:
    """Draw an error of the stored inverse roots, compared with exact ones."""
    return _over_steps(
        entries,
        f"error_{key}",
        f"Quantisation error: {error}",
        f"{error.capitalize()} of the stored inverse roots compared with exact ones; mean over "
        "the watched blocks.",
        label,
        ("errors", key),
        write,
        _frame_errors,
        f"the {error} of stored inverse roots",
    )


def _over_steps(
    entries: Sequence[LegendEntry],
    name: str,
    title: str,
    caption: str,
    label: str,
    path: tuple[str, ...],
    write: Write,
    frame: _Frame,
    words: str = "",
) -> Drawing | None:
    """Draw a number of evaluations or of watched roots against steps.

    Optimizers without this number are left out. If none has it, the result is None.

    Args:
        entries: The optimizers.
        name: File name without suffix.
        title: Title of the figure.
        caption: Caption of the figure.
        label: Label of the vertical axis.
        path: Path of the number in the summary. Its last key is the key in metrics lines.
        write: Format of the number.
        frame: Function that sets limits and scales.
        words: Description of the number in the alternative text. Default: the label.
    """
    kind: Literal["evals", "errors"] = "errors" if path[0] == "errors" else "evals"
    pairs = [(entry, curve(entry.outcome.counted, kind, path[-1])) for entry in entries]
    pairs = [(entry, series) for entry, series in pairs if series.steps]
    if not pairs:
        return None
    entries, curves = [entry for entry, _ in pairs], [series for _, series in pairs]
    figure, axes = new_figure(entries)
    for entry, series in pairs:
        plot_curve(axes, entry, series, "steps", series.mean, width=1.6, marked=True)
    caption += frame(axes, entries, curves) + notes(entries, curves)
    for entry, series in pairs:
        mark_diverged(axes, entry, series, "steps")
    axes.set(xlabel="step", ylabel=label)
    alt = f"Lines of {words or label}; last ones: {in_words(entries, write, *path)}"
    return Drawing(name, title, caption, alt, to_png(figure))


def _frame_validation(axes: Axes, entries: Sequence[LegendEntry], curves: Sequence[Curve]) -> str:
    """Show the later part of training, the base's last loss and where other optimizers reach it."""
    base = find([entry.outcome for entry in entries], "base")
    if len(entries) == 1 or base is None:
        frame_late(axes, curves, low=True)
        return ""
    final, first = base.losses.mean[-1], math.inf
    if math.isfinite(final):
        axes.axhline(final, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    for entry, losses in zip(entries, curves, strict=True):
        step = losses.first_at_most(final) if math.isfinite(final) else None
        if entry.outcome is base or step is None:
            continue
        first = min(first, step)
        axes.plot(
            step,
            losses.mean[losses.steps.index(step)],
            marker="o",
            markersize=7.5,
            markerfacecolor="none",
            markeredgecolor=entry.color,
            markeredgewidth=1.4,
            zorder=4,
        )
    frame_late(axes, curves, low=True, start=0.8 * first)
    return f" Dashed: the last loss of {base.label}; rings: first points at which others reach it."


def _frame_accuracy(axes: Axes, entries: Sequence[LegendEntry], curves: Sequence[Curve]) -> str:
    """Show the later part of training, with percentages."""
    frame_late(axes, curves, low=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    return ""


def _frame_errors(axes: Axes, entries: Sequence[LegendEntry], curves: Sequence[Curve]) -> str:
    """Start the axis at zero, or make it logarithmic if the errors differ by more than 8 times."""
    values = [value for errors in curves for value in errors.mean if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > 8 * min(values):
        log_scale(axes)
    elif values:
        axes.set_ylim(0, 1.1 * max(values) or 1)
    return ""
