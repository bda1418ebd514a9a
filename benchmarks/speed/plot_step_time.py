"""Plot the results of ``step_time.py``: the cost of a training step with AdamW and with kronbit.

Usage::

    python benchmarks/speed/plot_step_time.py results/speed/step_time_h200.json step_time.png

Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS = "shampoo 4-bit"
GREY, BLUE, ORANGE = "#b8bcc4", "#3b6ea8", "#e08a3c"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    report = json.loads(source.read_text())
    models = {
        name: figures for name, figures in report["models"].items() if OURS in figures["optimizers"]
    }
    figure, (steps, kinds) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for row, figures in enumerate(models.values()):
        ours = figures["optimizers"][OURS]
        forward, plain = ours["forward_backward_ms"], ours["adamw_ms"]
        whole = forward + plain
        added = ours["amortised_ms"] - plain
        first = row == 0
        steps.barh(row, 100 * forward / whole, color=GREY, label=first * "forward + backward")
        steps.barh(
            row,
            100 * plain / whole,
            left=100 * forward / whole,
            color=BLUE,
            label=first * "fused AdamW",
        )
        steps.barh(
            row, 100 * added / whole, left=100, color=ORANGE, label=first * "4-bit Shampoo adds"
        )
        steps.text(100.8 + 100 * added / whole, row, f"+{100 * added / whole:.1f} %", va="center")
    steps.set_yticks(range(len(models)), list(models))
    steps.invert_yaxis()
    steps.set_xlim(0, 124)
    steps.set_xlabel("average training step, % of one with AdamW")
    handles, labels = steps.get_legend_handles_labels()
    named = {label: handle for handle, label in zip(handles, labels, strict=True) if label}
    figure.legend(named.values(), named.keys(), loc="outside upper left", ncols=3, frameon=False)
    width = 0.26
    for number, (key, label, colour) in enumerate(
        (
            ("ordinary_ms", "ordinary", ORANGE),
            ("update_ms", "with update (T1)", BLUE),
            ("refresh_ms", "with update and refresh (T2)", GREY),
        )
    ):
        heights = [figures["optimizers"][OURS][key] for figures in models.values()]
        positions = [row + (number - 1) * width for row in range(len(models))]
        bars = kinds.bar(positions, heights, width, color=colour, label=label)
        kinds.bar_label(bars, fmt="%.3g", fontsize=8)
    kinds.set_yscale("log")
    kinds.set_ylim(0.5, 4000)
    kinds.set_xticks(range(len(models)), list(models))
    kinds.set_ylabel("optimizer step, ms")
    kinds.legend(frameon=False, fontsize=8, loc="upper left")
    for axes in (steps, kinds):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
