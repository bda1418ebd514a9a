"""Fill the tables of docs/results and of the README from the raw files in results.

Usage::

    python benchmarks/result_pages.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; ``TABLES`` says what of. The
tests look whether pages and files agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kronbit.lab.quantisation.tables import PRINTED
from kronbit.lab.report.numbers import MISSING

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MIB = 2**20
NETWORKS = {
    "Swin-Tiny": "cifar100-swin-tiny-10-epochs",
    "ResNet-34": "cifar100-resnet34-10-epochs",
}

Run = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ------------------------------------------------------------------------------------- trainings


def optimizer_of(run: Run) -> str:
    """Its label without the learning rate, which is a column."""
    words = [word for word in run["label"].split(", ") if not word.startswith("lr=")]
    return ", ".join(words)


def rate_text(lr: float) -> str:
    """A learning rate, as one writes it: 0.1, 2.5e-4."""
    if lr >= 0.01:
        return f"{lr:g}"
    digits, exponent = f"{lr:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def state_text(run: Run) -> str:
    """Second-order state."""
    held = run["memory"]["statistics"] + run["memory"]["roots"]
    return f"{held / _MIB:.1f} MiB" if held else MISSING


def state_bytes(run: Run) -> int:
    """All that the optimizer keeps, of first and of second order."""
    return sum(int(run["memory"][part]) for part in ("base", "statistics", "roots"))


def score_text(run: Run) -> str:
    """Accuracy, if there is one, and loss."""
    if run.get("diverged"):
        return "diverged"
    if run["accuracy"] is None:
        return f"{run['loss']:.3f}"
    return f"{100 * run['accuracy']:.1f} % ({run['loss']:.3f})"


def is_better(run: Run, than: Run) -> bool:
    if run.get("diverged") or than.get("diverged"):
        return not run.get("diverged")
    if run["accuracy"] is None:
        return bool(run["loss"] < than["loss"])
    return bool(run["accuracy"] > than["accuracy"])


_ORDER = (
    "AdamW",
    "SGDM",
    "+ 32-bit Shampoo",
    "+ 4-bit Shampoo (naive)",
    "+ 4-bit Shampoo (paper)",
    "+ 4-bit Shampoo",
    "Muon",
)


def by_optimizer(name: str) -> dict[str, list[Run]]:
    """The runs of every optimizer: the paper's rows first, and then what users would pick."""
    runs = read(f"{name}/summary.json")["runs"]
    names = sorted({optimizer_of(run) for run in runs}, key=_ORDER.index)
    return {name: [run for run in runs if optimizer_of(run) == name] for name in names}


def best_of(runs: Sequence[Run]) -> Run:
    best = runs[0]
    for run in runs:
        best = run if is_better(run, best) else best
    return best


def grid(name: str) -> str:
    """Learning rates side by side, optimizers below each other; the best of each in bold."""
    found = by_optimizer(name)
    rates = sorted({run["lr"] for runs in found.values() for run in runs})
    rows = []
    for optimizer, runs in found.items():
        best, cells = best_of(runs), dict.fromkeys(rates, "")
        for run in runs:
            text = score_text(run)
            cells[run["lr"]] = f"**{text}**" if run is best else text
        rows.append([optimizer, *cells.values(), state_text(best)])
    return table(
        ["optimizer", *(f"lr {rate_text(lr)}" for lr in rates), "second-order state"], rows
    )


def front() -> str:
    """The best of each optimizer, on two networks."""
    found = {network: by_optimizer(name) for network, name in NETWORKS.items()}
    rows = []
    for name in _ORDER:
        if name == "SGDM":  # in the row of AdamW
            continue
        row = ["first order alone: AdamW, SGDM" if name == "AdamW" else name]
        for network, own in found.items():
            runs = own.get("SGDM" if (name, network) == ("AdamW", "ResNet-34") else name)
            row += [MISSING, MISSING] if runs is None else _front_cells(best_of(runs))
        rows.append(row)
    head = [f"{network}{what}" for network in NETWORKS for what in (", accuracy", ", state")]
    return table(["optimizer", *head], rows)


def _front_cells(run: Run) -> list[str]:
    parts = (run["memory"]["base"], state_bytes(run) - run["memory"]["base"])
    state = " + ".join(f"{part / _MIB:.0f}" for part in parts if part)
    return [f"{100 * run['accuracy']:.1f} %", f"{state} MiB"]


def steps_to_base(name: str) -> str:
    """Where the best run of each first has the accuracy that the base's best ends with."""
    found = {label: best_of(runs) for label, runs in by_optimizer(name).items()}
    base, target = next((label, run["accuracy"]) for label, run in found.items())
    rows = []
    for label, run in found.items():
        if label != base:
            reached = zip(run["curve"]["step"], run["curve"]["accuracy"], strict=True)
            step = next((step for step, accuracy in reached if accuracy >= target), None)
            rows.append(
                [
                    label,
                    *(
                        [MISSING] * 2
                        if step is None
                        else [f"{step:,}", f"{run['steps'] / step:.2f} x"]
                    ),
                ]
            )
    return table(["optimizer", f"steps to {base}'s {100 * target:.1f} %", "fewer"], rows)


# ----------------------------------------------------------------------------- quantisation errors


def error_text(nre: float, angle: float) -> str:
    return f"{nre:.4f}, {angle:.2f}°"


def static(name: str, bits: int) -> str:
    """Every way to keep a matrix; of several matrices, the means."""
    content = read(f"quantisation-error/{name}.json")
    found: dict[tuple[str, Any], dict[tuple[str, str], list[Mapping[str, float]]]] = {}
    for matrix in content["matrices"]:
        for row in matrix["rows"]:
            if row["bits"] == bits:
                cells = found.setdefault((row["way"], row["rectified"]), {})
                for part in ("whole", "off_diagonal"):
                    cells.setdefault((row["mapping"], part), []).append(row[part])
    printed = _PRINTED_OF_SYNTHETIC if content["synthetic"] else _PRINTED_OF_SWIN
    columns = [(m, part) for m in ("linear2", "dt") for part in ("whole", "off_diagonal")]
    rows = []
    for (way, rectified), cells in found.items():
        label = f"{way}, rectified" if rectified else way
        row = [label]
        for mapping, part in columns:
            own = printed.get((bits, mapping, way, rectified), (None, None))
            beside = own[part == "off_diagonal"]
            text = error_text(*_mean(cells[mapping, part]))
            row.append(text + (f" ({error_text(*beside)})" if beside else ""))
        rows.append(row)
    names = {"whole": "", "off_diagonal": " without the diagonal"}
    return table(["quantised", *(f"{m}{names[part]}" for m, part in columns)], rows)


def _mean(found: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    nre, angle = (sum(one[key] for one in found) / len(found) for key in ("nre", "angle"))
    return nre, angle


# What the paper prints for its real preconditioner A1, of a Swin-Tiny as well: by bits, mapping and
# what is quantised, (NRE, angle) in A^(-1/4), and the same without the diagonal.
_PRINTED_OF_SWIN: dict[tuple[int, str, str, bool | None], tuple[Any, Any]] = {
    (4, "dt", "A", None): ((0.6241, 17.319), (0.9549, 59.360)),
    (4, "dt", "U", False): ((0.0709, 4.0426), (0.2328, 13.287)),
    (4, "dt", "U", True): ((0.0455, 2.5615), (0.1480, 8.4365)),
    (4, "dt", "B", None): ((0.0398, 2.2802), (0.1314, 7.5513)),
    (4, "dt", "A, B", None): ((0.6243, 17.364), (0.9561, 59.825)),
    (4, "dt", "U, B", False): ((0.0811, 4.6296), (0.2666, 15.281)),
    (4, "dt", "U, B", True): ((0.0604, 3.4230), (0.1977, 11.322)),
    (4, "linear2", "A", None): ((0.6243, 17.293), (0.9547, 58.336)),
    (4, "linear2", "U", False): ((0.0543, 3.1066), (0.1786, 10.213)),
    (4, "linear2", "U", True): ((0.0343, 1.9456), (0.1122, 6.4096)),
    (4, "linear2", "B", None): ((0.0315, 1.8050), (0.1041, 5.9554)),
    (4, "linear2", "A, B", None): ((0.6243, 17.301), (0.9548, 58.601)),
    (4, "linear2", "U, B", False): ((0.0626, 3.5833), (0.2063, 11.778)),
    (4, "linear2", "U, B", True): ((0.0466, 2.6494), (0.1530, 8.7337)),
    (8, "dt", "A", None): ((0.2192, 8.3014), (0.5001, 23.644)),
    (8, "dt", "U", False): ((0.0060, 0.3421), (0.0197, 1.1273)),
    (8, "dt", "U", True): ((0.0037, 0.2140), (0.0123, 0.7022)),
    (8, "dt", "B", None): ((0.0029, 0.1655), (0.0097, 0.5553)),
    (8, "dt", "A, B", None): ((0.2193, 8.3051), (0.5003, 23.649)),
    (8, "dt", "U, B", False): ((0.0067, 0.3810), (0.0219, 1.2577)),
    (8, "dt", "U, B", True): ((0.0047, 0.2712), (0.0156, 0.8955)),
    (8, "linear2", "A", None): ((0.2164, 7.9751), (0.4875, 21.447)),
    (8, "linear2", "U", False): ((0.0037, 0.2121), (0.0122, 0.6994)),
    (8, "linear2", "U", True): ((0.0023, 0.1312), (0.0076, 0.4343)),
    (8, "linear2", "B", None): ((0.0021, 0.1203), (0.0070, 0.4035)),
    (8, "linear2", "A, B", None): ((0.2164, 7.9755), (0.4875, 21.448)),
    (8, "linear2", "U, B", False): ((0.0043, 0.2439), (0.0141, 0.8079)),
    (8, "linear2", "U, B", True): ((0.0031, 0.1791), (0.0104, 0.5935)),
}
# Its table of the synthetic matrix is known to ``kronbit errors``.
_PRINTED_OF_SYNTHETIC = {
    key: tuple(own and (own.nre, own.angle) for own in pair) for key, pair in PRINTED.items()
}

_WAYS = {
    "shampoo-4-naive": "naive, paper",
    "shampoo-4-paper": "eigen, paper",
    "shampoo-4": "cholesky, compact",
}


def over_time_runs() -> list[tuple[str, str, Run]]:
    """(damping, how statistics and roots are kept, the run), in the tables' order."""
    found = []
    for run in read("quantisation-error-over-time/summary.json")["runs"]:
        variant = run["variant"]
        damping = "1e-4" if "damping=1e-4" in variant else "1e-6"
        way = "eigen, compact" if "method=eigen" in variant else _WAYS[variant.split("-lr=")[0]]
        found.append((damping, way, run))
    order = [*_WAYS.values(), "eigen, compact"]
    return sorted(found, key=lambda own: (own[0], order.index(own[1])))


def over_time() -> str:
    """Errors of watched roots at refreshes, by damping and way."""
    rows = []
    for damping, way, run in over_time_runs():
        found = run["errors"]
        pairs = zip(found["nre"], found["angle"], strict=True)
        accuracy = f"{100 * run['accuracy']:.1f} %"
        rows.append([damping, way, *(f"{nre:.3f}, {angle:.1f}°" for nre, angle in pairs), accuracy])
    return table(["ε", "kept", *(f"step {step}" for step in found["step"]), "accuracy"], rows)


_SPECTRA_AT = 6e-3  # the learning rate at which singular values of steps were looked at


def whitened_momentum() -> str:
    """Losses of every way to make a step, means over seeds; the best learning rate in bold."""
    path = ROOT / "benchmarks" / "results" / "whitened_momentum_cpu.json"
    by_row: dict[str, list[Run]] = {}
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        by_row.setdefault(run["optimizer"], []).append(run)
    rates = sorted({run["lr"] for runs in by_row.values() for run in runs})
    rows = []
    for optimizer, runs in by_row.items():
        at = {lr: [run for run in runs if run["lr"] == lr] for lr in rates}
        means = [sum(run["loss"] for run in own) / len(own) for own in at.values()]
        texts = [f"**{mean:.3f}**" if mean == min(means) else f"{mean:.3f}" for mean in means]
        peaks = [run["peak"] for run in at[_SPECTRA_AT]]
        rows.append([optimizer, *texts, f"{sum(peaks) / len(peaks):.1f}"])
    head = ["hidden matrices get", *(f"lr {rate_text(lr)}" for lr in rates), "peak of the spectrum"]
    return table(head, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "front": front,
    "swin-10-epochs": lambda: grid(NETWORKS["Swin-Tiny"]),
    "swin-steps": lambda: steps_to_base(NETWORKS["Swin-Tiny"]),
    "resnet34-steps": lambda: steps_to_base(NETWORKS["ResNet-34"]),
    "resnet34-10-epochs": lambda: grid(NETWORKS["ResNet-34"]),
    "synthetic-4": lambda: static("synthetic", 4),
    "synthetic-8": lambda: static("synthetic", 8),
    "synthetic-3": lambda: static("synthetic", 3),
    "swin-errors-4": lambda: static("swin-tiny", 4),
    "swin-errors-8": lambda: static("swin-tiny", 8),
    "swin-errors-3": lambda: static("swin-tiny", 3),
    "over-time": over_time,
    "whitened-momentum": whitened_momentum,
}


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda found: found[1] + "\n" + TABLES[found[2]]() + "\n" + found[3], text)


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
