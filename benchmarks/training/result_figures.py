"""Draw the figures of training runs in docs/results from the raw files in results.

Usage::

    python benchmarks/training/result_figures.py

Needs matplotlib. ``result_pages.py`` writes the tables, and ``kronbit errors --out`` the figures of
single matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from result_pages import choice_runs, over_time_runs
from training_tables import (
    GRIDS,
    LONG,
    ROOT,
    Run,
    best_of,
    by_optimizer,
    mean,
    rate_text,
    state_bytes,
)

from kronbit.lab.report.drawing import KNOWN, STYLE

FOLDER = ROOT / "docs" / "results"
_MIB = 2**20
_MUON = ("#a64d79", "-")
_LONGER = (KNOWN["base"][0], (0, (1.2, 1.2)))
_LOOKS: Mapping[str, tuple[str, Any]] = {
    "AdamW": KNOWN["base"],
    "SGDM": KNOWN["base"],
    "AdamW, 1.5 x as long": _LONGER,
    "SGDM, 1.5 x as long": _LONGER,
    "Muon": _MUON,
    "+ 32-bit Shampoo": KNOWN["shampoo-32"],
    "+ 4-bit Shampoo (naive)": KNOWN["shampoo-4-naive"],
    "+ 4-bit Shampoo (paper)": KNOWN["shampoo-4-paper"],
    "+ 4-bit Shampoo": KNOWN["shampoo-4"],
}
_STORAGES = {  # style by storage of statistics and roots, as the table names it
    "naive, paper": KNOWN["shampoo-4-naive"],
    "eigen, paper": KNOWN["shampoo-4-paper"],
    "eigen, compact": ("#3b6ea8", (0, (1.2, 1.2))),
    "cholesky, compact": KNOWN["shampoo-4"],
}


Row: TypeAlias = tuple[str, Sequence[Run]]  # an optimizer and the runs of its seeds


def best_runs(network: str) -> list[Row]:
    """Return the best run of every optimizer, best optimizer first."""
    runs_of = by_optimizer(*GRIDS[network]).items()
    return _best_first([(label, [best_of(runs)]) for label, runs in runs_of])


def long_runs(network: str) -> list[Row]:
    """Return the longer runs of every optimizer, best optimizer first."""
    return _best_first(list(by_optimizer(LONG[network]).items()))


def _best_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -mean(run["accuracy"] for run in row[1]))


def steps_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Plot accuracy against steps: the mean over seeds as a line, their range as a band."""
    for label, runs in rows:
        colour, style = _LOOKS[label]
        steps = [step / 1000 for step in runs[0]["curve"]["step"]]
        every = zip(*(run["curve"]["accuracy"] for run in runs), strict=True)
        seeds = [[100 * value for value in values] for values in every]
        named = f"{label}, lr {rate_text(runs[0]['lr'])}"
        axes.plot(steps, list(map(mean, seeds)), color=colour, linestyle=style, label=named)
        axes.fill_between(
            steps, list(map(min, seeds)), list(map(max, seeds)), color=colour, alpha=0.2, lw=0
        )
    axes.set_xlabel("thousand steps")
    axes.set_ylim(0, None)
    axes.legend(fontsize=8)


def memory_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Plot the final accuracy against the state of the optimizer."""
    for label, runs in rows:
        size, accuracy = state_bytes(runs[0]) / _MIB, 100 * mean(run["accuracy"] for run in runs)
        axes.plot(size, accuracy, "o", color=_LOOKS[label][0], markersize=7)
        right = size > 500
        axes.annotate(
            label,
            (size, accuracy),
            xytext=(-7 if right else 7, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va={"+ 4-bit Shampoo (paper)": "center", "+ 4-bit Shampoo (naive)": "top"}.get(
                label, "bottom"
            ),
            fontsize=8,
        )
    axes.set_xlim(0, None)
    axes.margins(y=0.12)
    axes.set_xlabel("state of the optimizer, first and second order, MiB")


def cifar100(panel: Callable[[Axes, Sequence[Row]], None], longer: bool) -> Any:
    """Draw both networks next to each other, with their shorter or longer runs."""
    figure, all_axes = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    trained = "30 epochs of CIFAR-100, two seeds" if longer else "10 epochs of CIFAR-100"
    for axes, network in zip(all_axes, LONG, strict=True):
        panel(axes, long_runs(network) if longer else best_runs(network))
        axes.set_title(f"{network}, {trained}", fontsize=9.5, loc="left")
        axes.yaxis.set_major_formatter("{x:g} %")
    all_axes[0].set_ylabel("test accuracy")
    return figure


def over_time() -> Any:
    """Draw the errors of roots during training, by damping."""
    figure, all_axes = plt.subplots(2, 2, figsize=(9, 5.2), layout="constrained", sharex=True)
    for damping, scheme, run in over_time_runs():
        column = ("1e-6", "1e-4").index(damping)
        colour, style = _STORAGES[scheme]
        for axes, key in zip(all_axes[:, column], ("nre", "angle"), strict=True):
            errors = run["errors"]
            axes.plot(errors["step"], errors[key], color=colour, linestyle=style, label=scheme)
            axes.set_ylim(0, None)
    for axes, damping in zip(all_axes[0], ("10⁻⁶", "10⁻⁴"), strict=True):
        axes.set_title(f"ε = {damping}", fontsize=9.5, loc="left")
    all_axes[0, 0].legend(fontsize=8)
    all_axes[0, 0].set_ylabel("relative error (NRE)")
    all_axes[1, 0].set_ylabel("angle in degrees")
    for axes in all_axes[1]:
        axes.set_xlabel("step")
    return figure


def choices() -> Any:
    """Draw the loss of a small GPT by intervals, order and bits."""
    figure, all_axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained", sharey=True)
    adamw = mean(run["loss"] for run in choice_runs("T1, T2")["never (AdamW)"])
    intervals = [(int(value.split(", ")[0]), runs) for value, runs in _numbers("T1, T2")]
    orders = [(min(512, int(value.split()[0])), runs) for value, runs in _numbers("`max_order`")]
    for axes, rows in zip(all_axes, (intervals, orders), strict=False):
        axes.plot(*zip(*((x, mean(r["loss"] for r in runs)) for x, runs in rows), strict=True), "-")
        for x, runs in rows:
            axes.plot([x] * len(runs), [run["loss"] for run in runs], "o", color="0.5", ms=3)
        axes.set_xscale("log")
        axes.set_xticks([x for x, _ in rows], [str(x) for x, _ in rows])
        axes.minorticks_off()
    for value, runs in choice_runs("statistics, roots").items():
        size, loss = _second_order(runs[0]) / _MIB, mean(run["loss"] for run in runs)
        all_axes[2].plot(size, loss, "o")
        text = value.replace("`", "").replace(", as in the paper", "")
        all_axes[2].annotate(text, (size, loss), (4, 3), textcoords="offset points", fontsize=7)
    all_axes[2].set_xscale("log")
    all_axes[2].set_xlim(0.6, 45)
    all_axes[2].minorticks_off()
    all_axes[2].set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    for axes, label in zip(
        all_axes, ("T1, steps", "largest order of a block", "second-order state, MiB"), strict=True
    ):
        axes.axhline(adamw, color=KNOWN["base"][0], linestyle=":", linewidth=1)
        axes.set_xlabel(label)
    all_axes[0].annotate("AdamW", (2, adamw), (0, 3), textcoords="offset points", fontsize=8)
    all_axes[0].set_ylabel("validation loss")
    return figure


def _numbers(name: str) -> list[tuple[str, list[Run]]]:
    return [(value, runs) for value, runs in choice_runs(name).items() if value[0].isdigit()]


def _second_order(run: Run) -> int:
    return int(run["memory"]["statistics"] + run["memory"]["roots"])


def main() -> None:
    with mpl.rc_context(STYLE):
        figures = {
            "cifar100.png": cifar100(steps_panel, longer=True),
            "cifar100_10_epochs.png": cifar100(steps_panel, longer=False),
            "cifar100_memory.png": cifar100(memory_panel, longer=True),
            "over_time.png": over_time(),
            "choosing.png": choices(),
        }
        for name, figure in figures.items():
            figure.savefig(FOLDER / name, dpi=150)


if __name__ == "__main__":
    main()
