"""Make tables of training runs from the raw files in results. ``result_pages.py`` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from kronbit.lab.report.numbers import MISSING

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
_MIB = 2**20
# Files of runs at all learning rates.
GRIDS = {
    "Swin-Tiny": ("cifar100-swin-tiny-10-epochs",),
    "ResNet-34": (
        "cifar100-resnet34-10-epochs",
        "cifar100-resnet34-high-rates",
        "cifar100-resnet34-highest-rates",
    ),
}
# Files of runs with two seeds, and of short runs that had the GPU to themselves.
LONG = {"Swin-Tiny": "cifar100-swin-tiny-30-epochs", "ResNet-34": "cifar100-resnet34-30-epochs"}
TIMES = {"Swin-Tiny": "cifar100-swin-tiny-times", "ResNet-34": "cifar100-resnet34-times"}
_LONGER = ", 1.5 x as long"

Run = Mapping[str, Any]


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def optimizer_of(run: Run) -> str:
    """Return the label of a run without the learning rate, which is a column."""
    words = [word for word in run["label"].split(", ") if not word.startswith("lr=")]
    return ", ".join(words)


def rate_text(lr: float) -> str:
    """Format a learning rate: 0.1, 2.5e-4."""
    if lr >= 0.01:
        return f"{lr:g}"
    digits, exponent = f"{lr:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def state_text(run: Run) -> str:
    """Format the size of second-order state."""
    size = run["memory"]["statistics"] + run["memory"]["roots"]
    return f"{size / _MIB:.1f} MiB" if size else MISSING


def state_bytes(run: Run) -> int:
    """Return the bytes of first-order and second-order state."""
    return sum(int(run["memory"][part]) for part in ("base", "statistics", "roots"))


def score_text(run: Run) -> str:
    """Format the accuracy, if there is one, and the loss."""
    if run.get("diverged"):
        return "diverged"
    if run["accuracy"] is None:
        return f"{run['loss']:.3f}"
    return f"{percent(run['accuracy'])} ({run['loss']:.3f})"


def is_better(run: Run, than: Run) -> bool:
    if run.get("diverged") or than.get("diverged"):
        return not run.get("diverged")
    if run["accuracy"] is None:
        return bool(run["loss"] < than["loss"])
    return bool(run["accuracy"] > than["accuracy"])


_ORDER = (
    "AdamW",
    "SGDM",
    f"AdamW{_LONGER}",
    f"SGDM{_LONGER}",
    "+ 32-bit Shampoo",
    "+ 4-bit Shampoo (naive)",
    "+ 4-bit Shampoo (paper)",
    "+ 4-bit Shampoo",
    "Muon",
)


def by_optimizer(*files: str) -> dict[str, list[Run]]:
    """Return the runs of every optimizer: first the rows of the paper, then kronbit's default."""
    runs = [run for name in files for run in read(f"{name}/summary.json")["runs"]]
    names = sorted({optimizer_of(run) for run in runs}, key=_ORDER.index)
    return {name: [run for run in runs if optimizer_of(run) == name] for name in names}


def mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items)


def best_of(runs: Sequence[Run]) -> Run:
    best = runs[0]
    for run in runs:
        best = run if is_better(run, best) else best
    return best


def grid(network: str) -> str:
    """Make a table of optimizers and learning rates, with the best rate of each in bold."""
    runs_of = by_optimizer(*GRIDS[network])
    rates = sorted({run["lr"] for runs in runs_of.values() for run in runs})
    rows = []
    for optimizer, runs in runs_of.items():
        best, cells = best_of(runs), dict.fromkeys(rates, "")
        for run in runs:
            text = score_text(run)
            cells[run["lr"]] = f"**{text}**" if run is best else text
        rows.append([optimizer, *cells.values(), state_text(best)])
    return table(
        ["optimizer", *(f"lr {rate_text(lr)}" for lr in rates), "second-order state"], rows
    )


def front() -> str:
    """Make a table of the longer runs of both networks, whose rows match by position."""
    networks = [by_optimizer(name) for name in LONG.values()]
    rows = []
    for labels in zip(*networks, strict=True):
        name = labels[0]
        if len(set(labels)) > 1:
            bases = " and ".join(label.removesuffix(_LONGER) for label in labels)
            name = f"{bases} alone" + (_LONGER if name.endswith(_LONGER) else "")
        cells = (
            _front_cells(runs_of[label]) for runs_of, label in zip(networks, labels, strict=True)
        )
        rows.append([name, *(cell for pair in cells for cell in pair)])
    head = [f"{network}{what}" for network in LONG for what in ("", ": state")]
    return table(["optimizer", *head], rows)


def _front_cells(runs: Sequence[Run]) -> list[str]:
    base, size = runs[0]["memory"]["base"], state_bytes(runs[0])
    state = " + ".join(f"{part / _MIB:.0f}" for part in (base, size - base) if part)
    return [percent(mean(run["accuracy"] for run in runs)), f"{state} MiB"]


def percent(value: float) -> str:
    """Format a share with one digit; 64.55 rounds to 64.6, although no float equals it."""
    exact = Decimal(f"{100 * value:.6f}")
    return f"{exact.quantize(Decimal('0.1'), ROUND_HALF_UP)} %"


def steps_to(run: Run, target: float) -> int | None:
    """Return the step of the first evaluation that reaches an accuracy, or None."""
    reached = zip(run["curve"]["step"], run["curve"]["accuracy"], strict=True)
    return next((step for step, accuracy in reached if accuracy >= target), None)


def steps_to_base(network: str) -> str:
    """Make a table of the steps to the final accuracy of the base's best run."""
    best_run_of = {label: best_of(runs) for label, runs in by_optimizer(*GRIDS[network]).items()}
    base, target = next((label, run["accuracy"]) for label, run in best_run_of.items())
    rows = []
    for label, run in best_run_of.items():
        if label != base:
            step = steps_to(run, target)
            cells = ["never", ""] if step is None else [f"{step:,}", f"{run['steps'] / step:.2f} x"]
            rows.append([label, *cells])
    return table(["optimizer", f"steps to {base}'s {percent(target)}", "fewer"], rows)


def step_times(network: str) -> dict[str, float]:
    """Return milliseconds of a step by optimizer."""
    return {label: runs[0]["steady_ms"] for label, runs in by_optimizer(TIMES[network]).items()}


def longer(network: str) -> str:
    """Make a table of the runs with two seeds."""
    times = step_times(network)
    rows = []
    for label, runs in by_optimizer(LONG[network]).items():
        accuracies = [run["accuracy"] for run in runs]
        ms = times.get(label.removesuffix(_LONGER))
        steps = runs[0]["steps"]
        rows.append(
            [
                label,
                f"{steps:,}",
                f"{percent(mean(accuracies))} ({', '.join(map(percent, accuracies))})",
                f"{mean(run['loss'] for run in runs):.3f}",
                f"{mean(run['train_loss'] for run in runs):.3f}",
                state_text(runs[0]),
                f"{max(run['memory']['peak'] for run in runs) / _MIB:,.0f} MiB",
                *([MISSING] * 2 if ms is None else [f"{ms:.2f}", f"{ms * steps / 1000:.0f} s"]),
            ]
        )
    head = ["optimizer", "steps", "accuracy", "loss", "training loss", "second-order state"]
    return table([*head, "peak memory", "ms per step", "time"], rows)


def time_to_target(network: str) -> str:
    """Make a table of steps and seconds to the accuracy of the base after 1.5 x as many epochs."""
    times, runs_of = step_times(network), by_optimizer(LONG[network])
    (base, longest) = next((label, runs) for label, runs in runs_of.items() if _LONGER in label)
    first = base.removesuffix(_LONGER)
    targets = {run["seed"]: run["accuracy"] for run in longest}
    # The steps of the base also end where it first reaches its final accuracy.
    slowest = mean(steps_to(run, run["accuracy"]) or run["steps"] for run in longest)
    rows = []
    for label, runs in runs_of.items():
        if label == first:
            continue
        steps = [steps_to(run, targets[run["seed"]]) for run in runs]
        reached = [step for step in steps if step is not None]
        if len(reached) < len(runs):
            rows.append([label, "never", "", "", ""])
            continue
        fewer, ms = slowest / mean(reached), times.get(label.removesuffix(_LONGER))
        row = [label, " and ".join(f"{step:,}" for step in reached)]
        row.append("" if label == base else f"{fewer:.2f} x")
        row.append(MISSING if ms is None else f"{ms * mean(reached) / 1000:.0f} s")
        faster = "" if label == base or ms is None else f"{fewer * times[first] / ms:.2f} x"
        rows.append([*row, faster])
    target = percent(mean(run["accuracy"] for run in longest))
    return table(["optimizer", f"steps to {first}'s {target}", "fewer", "time", "less"], rows)
