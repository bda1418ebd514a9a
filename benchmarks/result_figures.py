"""Draw the figures of trainings in docs/results from the raw files in results.

Usage::

    python benchmarks/result_figures.py

Needs matplotlib. Tables come from ``result_pages.py``, figures of single matrices from
``kronbit errors --out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from result_pages import (
    NETWORKS,
    ROOT,
    Run,
    best_of,
    by_optimizer,
    over_time_runs,
    rate_text,
    state_bytes,
)

from kronbit.lab.report.drawing import KNOWN, STYLE

FOLDER = ROOT / "docs" / "results"
_MIB = 2**20
_MUON = ("#a64d79", "-")
_LOOKS: Mapping[str, tuple[str, Any]] = {
    "AdamW": KNOWN["base"],
    "SGDM": KNOWN["base"],
    "Muon": _MUON,
    "+ 32-bit Shampoo": KNOWN["shampoo-32"],
    "+ 4-bit Shampoo (naive)": KNOWN["shampoo-4-naive"],
    "+ 4-bit Shampoo (paper)": KNOWN["shampoo-4-paper"],
    "+ 4-bit Shampoo": KNOWN["shampoo-4"],
}
_KEPT = {  # how statistics and roots are kept, by what the table calls it
    "naive, paper": KNOWN["shampoo-4-naive"],
    "eigen, paper": KNOWN["shampoo-4-paper"],
    "eigen, compact": ("#3b6ea8", (0, (1.2, 1.2))),
    "cholesky, compact": KNOWN["shampoo-4"],
}


def best_runs(name: str) -> list[tuple[str, Run]]:
    """The best learning rate of every optimizer, best first."""
    found = [(label, best_of(runs)) for label, runs in by_optimizer(name).items()]
    return sorted(found, key=lambda pair: -pair[1]["accuracy"])


def steps_panel(axes: Axes, runs: Sequence[tuple[str, Run]]) -> None:
    """Accuracy in the course of training."""
    for label, run in runs:
        colour, style = _LOOKS[label]
        steps = [step / 1000 for step in run["curve"]["step"]]
        accuracy = [100 * value for value in run["curve"]["accuracy"]]
        named = f"{label}, lr {rate_text(run['lr'])}"
        axes.plot(steps, accuracy, color=colour, linestyle=style, label=named)
    axes.set_xlabel("thousand steps")
    axes.set_ylim(0, None)
    axes.legend(fontsize=8)


def memory_panel(axes: Axes, runs: Sequence[tuple[str, Run]]) -> None:
    """What the best run of each reached, against the state of its optimizer."""
    for label, run in runs:
        size, accuracy = state_bytes(run) / _MIB, 100 * run["accuracy"]
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


def cifar100(panel: Any) -> Any:
    """Both networks side by side."""
    figure, every = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    for axes, (network, name) in zip(every, NETWORKS.items(), strict=True):
        panel(axes, best_runs(name))
        axes.set_title(f"{network} on CIFAR-100, 10 epochs", fontsize=9.5, loc="left")
        axes.yaxis.set_major_formatter("{x:.0f} %")
    every[0].set_ylabel("test accuracy")
    return figure


def over_time() -> Any:
    """Errors of roots along a training, by damping."""
    figure, every = plt.subplots(2, 2, figsize=(9, 5.2), layout="constrained", sharex=True)
    for damping, way, run in over_time_runs():
        column = ("1e-6", "1e-4").index(damping)
        colour, style = _KEPT[way]
        for axes, key in zip(every[:, column], ("nre", "angle"), strict=True):
            found = run["errors"]
            axes.plot(found["step"], found[key], color=colour, linestyle=style, label=way)
            axes.set_ylim(0, None)
    for axes, damping in zip(every[0], ("10⁻⁶", "10⁻⁴"), strict=True):
        axes.set_title(f"ε = {damping}", fontsize=9.5, loc="left")
    every[0, 0].legend(fontsize=8)
    every[0, 0].set_ylabel("relative error (NRE)")
    every[1, 0].set_ylabel("angle in degrees")
    for axes in every[1]:
        axes.set_xlabel("step")
    return figure


def main() -> None:
    with mpl.rc_context(STYLE):
        figures = {
            "cifar100_10_epochs.png": cifar100(steps_panel),
            "cifar100_memory.png": cifar100(memory_panel),
            "over_time.png": over_time(),
        }
        for name, figure in figures.items():
            figure.savefig(FOLDER / name, dpi=150)


if __name__ == "__main__":
    main()
