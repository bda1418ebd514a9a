"""Fill the tables of the docs and of the README from the raw files in results.

Usage::

    python benchmarks/training/result_pages.py

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``; ``TABLES`` maps every name to a
function. The tests compare pages with files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from training_tables import (
    RESULTS,
    ROOT,
    Run,
    front,
    grid,
    longer,
    mean,
    percent,
    rate_text,
    read,
    state_text,
    steps_to_base,
    table,
    time_to_target,
)

from kronbit.lab.quantization.tables import PRINTED
from kronbit.lab.report.numbers import MISSING

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def measured(name: str) -> dict[str, Any]:
    """Return the file of a benchmark."""
    (path,) = RESULTS.glob(f"*/{name}")
    return read(path.name, path.parent)


# ----------------------------------------------------------------------------- quantisation errors


def error_text(nre: float, angle: float) -> str:
    return f"{nre:.4f}, {angle:.2f}°"


def static(name: str, bits: int) -> str:
    """Make a table of the errors of every scheme, as means over matrices."""
    content = read(f"quantisation-error/{name}.json")
    cells_of: dict[tuple[str, Any], dict[tuple[str, str], list[Mapping[str, float]]]] = {}
    for matrix in content["matrices"]:
        for row in matrix["rows"]:
            if row["bits"] == bits:
                cells = cells_of.setdefault((row["way"], row["rectified"]), {})
                for part in ("whole", "off_diagonal"):
                    cells.setdefault((row["mapping"], part), []).append(row[part])
    printed = _PRINTED_OF_SYNTHETIC if content["synthetic"] else _PRINTED_OF_SWIN
    columns = [(m, part) for m in ("linear2", "dt") for part in ("whole", "off_diagonal")]
    rows = []
    for (scheme, rectified), cells in cells_of.items():
        label = f"{scheme}, rectified" if rectified else scheme
        row = [label]
        for mapping, part in columns:
            printed_errors = printed.get((bits, mapping, label), ())
            number = ("whole", "off_diagonal").index(part)
            text = error_text(*_means(cells[mapping, part]))
            if number < len(printed_errors):
                text += f" ({error_text(*printed_errors[number])})"
            row.append(text)
        rows.append(row)
    names = {"whole": "", "off_diagonal": " without the diagonal"}
    return table(["quantised", *(f"{m}{names[part]}" for m, part in columns)], rows)


def _means(errors: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    nre, angle = (mean(error[key] for error in errors) for key in ("nre", "angle"))
    return nre, angle


# Printed by the paper for its real preconditioner A1, also of a Swin-Tiny: by bits, mapping and
# quantised matrices, (NRE, angle) of A^(-1/4), and the same without the diagonal.
_PRINTED_OF_SWIN: dict[tuple[int, str, str], Sequence[Any]] = {
    (4, "dt", "A"): ((0.6241, 17.319), (0.9549, 59.360)),
    (4, "dt", "U"): ((0.0709, 4.0426), (0.2328, 13.287)),
    (4, "dt", "U, rectified"): ((0.0455, 2.5615), (0.1480, 8.4365)),
    (4, "dt", "B"): ((0.0398, 2.2802), (0.1314, 7.5513)),
    (4, "dt", "A, B"): ((0.6243, 17.364), (0.9561, 59.825)),
    (4, "dt", "U, B"): ((0.0811, 4.6296), (0.2666, 15.281)),
    (4, "dt", "U, B, rectified"): ((0.0604, 3.4230), (0.1977, 11.322)),
    (4, "linear2", "A"): ((0.6243, 17.293), (0.9547, 58.336)),
    (4, "linear2", "U"): ((0.0543, 3.1066), (0.1786, 10.213)),
    (4, "linear2", "U, rectified"): ((0.0343, 1.9456), (0.1122, 6.4096)),
    (4, "linear2", "B"): ((0.0315, 1.8050), (0.1041, 5.9554)),
    (4, "linear2", "A, B"): ((0.6243, 17.301), (0.9548, 58.601)),
    (4, "linear2", "U, B"): ((0.0626, 3.5833), (0.2063, 11.778)),
    (4, "linear2", "U, B, rectified"): ((0.0466, 2.6494), (0.1530, 8.7337)),
    (8, "dt", "A"): ((0.2192, 8.3014), (0.5001, 23.644)),
    (8, "dt", "U"): ((0.0060, 0.3421), (0.0197, 1.1273)),
    (8, "dt", "U, rectified"): ((0.0037, 0.2140), (0.0123, 0.7022)),
    (8, "dt", "B"): ((0.0029, 0.1655), (0.0097, 0.5553)),
    (8, "dt", "A, B"): ((0.2193, 8.3051), (0.5003, 23.649)),
    (8, "dt", "U, B"): ((0.0067, 0.3810), (0.0219, 1.2577)),
    (8, "dt", "U, B, rectified"): ((0.0047, 0.2712), (0.0156, 0.8955)),
    (8, "linear2", "A"): ((0.2164, 7.9751), (0.4875, 21.447)),
    (8, "linear2", "U"): ((0.0037, 0.2121), (0.0122, 0.6994)),
    (8, "linear2", "U, rectified"): ((0.0023, 0.1312), (0.0076, 0.4343)),
    (8, "linear2", "B"): ((0.0021, 0.1203), (0.0070, 0.4035)),
    (8, "linear2", "A, B"): ((0.2164, 7.9755), (0.4875, 21.448)),
    (8, "linear2", "U, B"): ((0.0043, 0.2439), (0.0141, 0.8079)),
    (8, "linear2", "U, B, rectified"): ((0.0031, 0.1791), (0.0104, 0.5935)),
}
# ``kronbit errors`` has the paper's table of the synthetic matrix.
_PRINTED_OF_SYNTHETIC = {
    key: [(error.nre, error.angle) for error in pair] for key, pair in PRINTED.items()
}

_SCHEMES = {
    "shampoo-4-naive": "naive, paper",
    "shampoo-4-paper": "eigen, paper",
    "shampoo-4": "cholesky, compact",
}


def over_time_runs() -> list[tuple[str, str, Run]]:
    """Return damping, storage and run of every row, in the order of the table."""
    rows = []
    for run in read("quantisation-error-over-time/summary.json")["runs"]:
        variant = run["variant"]
        damping = "1e-4" if "damping=1e-4" in variant else "1e-6"
        kind = "eigen, compact" if "method=eigen" in variant else _SCHEMES[variant.split("-lr=")[0]]
        rows.append((damping, kind, run))
    order = [*_SCHEMES.values(), "eigen, compact"]
    return sorted(rows, key=lambda row: (row[0], order.index(row[1])))


def over_time() -> str:
    """Make a table of the errors of watched roots at refreshes, by damping and storage."""
    rows = []
    for damping, scheme, run in over_time_runs():
        errors = run["errors"]
        pairs = zip(errors["nre"], errors["angle"], strict=True)
        accuracy = percent(run["accuracy"])
        rows.append(
            [damping, scheme, *(f"{nre:.3f}, {angle:.1f}°" for nre, angle in pairs), accuracy]
        )
    return table(["ε", "storage", *(f"step {step}" for step in errors["step"]), "accuracy"], rows)


# ------------------------------------------------------------------------------------------ theory


def theory() -> dict[str, Any]:
    return measured("theory_cpu.json")


def lemma_1() -> str:
    """Make a table of α, β, errors of powers and the lemma's bounds; violations are in bold."""
    rows = []
    for case in theory()["lemma_1"]:
        row = [f"{case['mapping']}, {case['bits']} bits, {case['bjorck_steps']}"]
        row += [f"{case['alpha']:.4f}", f"{case['beta']:.4f}", f"{case['mean_squared_length']:.3f}"]
        powers = [case["powers"][s] for s in ("-0.25", "-1.0", "-8.0")]
        row += [_marked(errors["nre"], errors["nre"] > case["nre_bound"]) for errors in powers]
        row += [f"{case['nre_bound']:.4f}"]
        row += [f"{case['nre_sharp_bound']:.4f}" if case["orthogonal"] else ""]
        row += [
            _marked(errors["cosine"], errors["cosine"] < case["cosine_bound"]) for errors in powers
        ]
        rows.append([*row, f"{case['cosine_bound']:.4f}"])
    head = ["mapping, bits, steps", "α", "β", "length²", "NRE, s = -1/4", "s = -1", "s = -8", "2α"]
    return table([*head, "sharp", "cosine, s = -1/4", "s = -1", "s = -8", "(1 - β)²"], rows)


def _marked(value: float, mark: bool) -> str:
    return f"**{value:.4f}**" if mark else f"{value:.4f}"


def regret(name: str) -> str:
    """Make a table of the regret for every storage of L and R, at both rates."""
    (problem,) = (one for one in theory()["regret"] if one["name"].startswith(name))
    rows = []
    for scheme, both in problem["ways"].items():
        row = [f"{scheme} (default)" if scheme == "cholesky, compact" else scheme]
        for key, text in (("regret", "{:.1f}"), ("first_link", "{:.0f}"), ("bound", "{:.1e}")):
            row.append(", ".join(text.format(outcome[key]).replace("e+0", "e") for outcome in both))
        row.append(", ".join(f"{outcome['slack']:,.0f}" for outcome in both))
        shares = [both[0][f"{side}_error_trace_over_exact"] for side in ("left", "right")]
        rows.append([*row, ", ".join(f"{share:.2f}" for share in shares)])
    head = ["L and R", "regret at η₁, η₁/4", "first link", "bound", "slack"]
    return table([*head, "error / exact at η₁, L and R"], rows)


# ---------------------------------------------------------------------------- why Muon is ahead


_SPECTRA_AT = 6e-3  # the learning rate that suits most rows


def whitened_momentum() -> str:
    """Make a table of mean losses over seeds by optimizer, with the best rate in bold."""
    by_row: dict[str, list[Run]] = {}
    for run in measured("whitened_momentum_cpu.json")["runs"]:
        by_row.setdefault(run["optimizer"], []).append(run)
    by_row["SOAP, all matrices"] = read("pydoc-gpt-soap/summary.json")["runs"]
    rates = sorted({run["lr"] for runs in by_row.values() for run in runs})
    rows = []
    for optimizer, runs in by_row.items():
        at = [[run for run in runs if run["lr"] == lr] for lr in rates]
        means = [mean(run["loss"] for run in at_rate) for at_rate in at]
        best = means.index(min(means))
        texts = [f"**{loss:.3f}**" if i == best else f"{loss:.3f}" for i, loss in enumerate(means)]
        peaks = [run.get("peak") for run in at[rates.index(_SPECTRA_AT)]]
        rows.append([optimizer, *texts, MISSING if None in peaks else f"{mean(peaks):.1f}"])
    head = ["hidden matrices get", *(f"lr {rate_text(lr)}" for lr in rates)]
    return table([*head, f"peak of the spectrum at {rate_text(_SPECTRA_AT)}"], rows)


# ------------------------------------------------------------------------------------- choosing

# Variants by the value of one option; all other options have their defaults.
_FOUR = "shampoo-4"
CHOICES: Mapping[str, Mapping[str, str]] = {
    "T1, T2": {
        "2, 12": f"{_FOUR}-update_every=2-refresh_every=12",
        "5, 20": f"{_FOUR}-update_every=5-refresh_every=20",
        "10, 50": _FOUR,
        "30, 100": f"{_FOUR}-update_every=30-refresh_every=100",
        "100, 300": f"{_FOUR}-update_every=100-refresh_every=300",
        "never (AdamW)": "base",
    },
    "`max_order`": {
        "32": f"{_FOUR}-max_order=32",
        "64": f"{_FOUR}-max_order=64",
        "128": f"{_FOUR}-max_order=128",
        "256": f"{_FOUR}-max_order=256",
        "1200 (nothing is cut)": _FOUR,
    },
    "statistics, roots": {
        "3 bits": f"{_FOUR}-bits=3",
        "4 bits": _FOUR,
        "6 and 4 bits": f"{_FOUR}-bits=6-root_bits=4",
        "8 bits": f"{_FOUR}-bits=8",
        "32 bits": "shampoo-32",
        "4 bits, `eigen`, as in the paper": "shampoo-4-paper",
        "4 bits, `naive`": "shampoo-4-naive",
    },
    "`start`": {
        "0": f"{_FOUR}-start=0",
        "ε I, that is 1e-6 I": _FOUR,
        "1e-4": f"{_FOUR}-start=1e-4",
    },
    "`damping`": {
        "1e-8": f"{_FOUR}-damping=1e-8",
        "1e-6": _FOUR,
        "1e-4": f"{_FOUR}-damping=1e-4",
        "1e-2": f"{_FOUR}-damping=1e-2",
    },
}


def choice_runs(name: str) -> dict[str, list[Run]]:
    """Return the runs of every value of an option."""
    runs = read("pydoc-gpt-choosing/summary.json")["runs"]
    return {
        value: [run for run in runs if run["variant"] == variant]
        for value, variant in CHOICES[name].items()
    }


def choosing(name: str) -> str:
    """Make a table of the losses of both seeds and of the state, by value of an option."""
    rows = []
    for value, runs in choice_runs(name).items():
        losses = [run["loss"] for run in runs]
        texts = ", ".join(f"{loss:.3f}" for loss in losses)
        rows.append([value, texts, f"{mean(losses):.3f}", state_text(runs[0])])
    return table([name, "validation loss by seed", "mean", "second-order state"], rows)


# ----------------------------------------------------------------------------- compatibility


def compatibility() -> str:
    """Make a table of the outcomes of ``kronbit doctor``, by optimizer."""
    outcomes = measured("compatibility_cpu.json")["optimizers"]
    checks = next(iter(outcomes.values()))["checks"]
    rows = [
        [check, *(_outcome(outcome["checks"][check]) for outcome in outcomes.values())]
        for check in checks
    ]
    return table(
        ["", *(f"{name} {outcome['version']}" for name, outcome in outcomes.items())], rows
    )


def _outcome(problem: str) -> str:
    """Shorten an outcome for a column: the kind of an error, or the problem."""
    first, _, rest = problem.partition(": ")
    kind = rest.partition(": ")[0] if first == "ProcessRaisedException" else first
    return kind if rest and " " not in kind else problem


# ------------------------------------------------------------------------- adapters, long runs


def lora() -> str:
    """Make a table of the losses of both seeds after LoRA and of the state."""
    rows = []
    for name, row in measured("lora_cpu.json")["rows"].items():
        losses, size = row["losses"], row["second_order_bytes"]
        texts = ", ".join(f"{loss:.3f}" for loss in losses)
        rows.append([name, texts, f"{mean(losses):.3f}", f"{size / 1024:.0f} KiB" if size else ""])
    return table(["", "validation loss by seed", "mean", "second-order state"], rows)


def soak() -> str:
    """Make a table of the length of runs, the equality of repeated runs, and memory drift."""
    kinds = ("tensors", "peak", "reserved", "host")
    head = ["", "steps", "states compared", "the same", *(f"drift: {kind}" for kind in kinds)]
    rows = []
    for name, setup in measured("soak_h200.json")["setups"].items():
        drifts = [f"{100 * setup['drift'][kind]:.2f} %" for kind in kinds]
        same = "all" if setup["equal"] else "not all"
        rows.append(
            [name, f"{setup['compared_steps']:,}", f"{setup['compared_laps']}", same, *drifts]
        )
    return table(head, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "lora": lora,
    "soak": soak,
    "choosing-intervals": lambda: choosing("T1, T2"),
    "choosing-order": lambda: choosing("`max_order`"),
    "choosing-bits": lambda: choosing("statistics, roots"),
    "choosing-start": lambda: choosing("`start`"),
    "choosing-damping": lambda: choosing("`damping`"),
    "compatibility": compatibility,
    "front": front,
    "swin-30-epochs": lambda: longer("Swin-Tiny"),
    "swin-time-to-target": lambda: time_to_target("Swin-Tiny"),
    "resnet34-30-epochs": lambda: longer("ResNet-34"),
    "resnet34-time-to-target": lambda: time_to_target("ResNet-34"),
    "swin-10-epochs": lambda: grid("Swin-Tiny"),
    "swin-steps": lambda: steps_to_base("Swin-Tiny"),
    "resnet34-steps": lambda: steps_to_base("ResNet-34"),
    "resnet34-10-epochs": lambda: grid("ResNet-34"),
    "synthetic-4": lambda: static("synthetic", 4),
    "synthetic-8": lambda: static("synthetic", 8),
    "synthetic-3": lambda: static("synthetic", 3),
    "swin-errors-4": lambda: static("swin-tiny", 4),
    "swin-errors-8": lambda: static("swin-tiny", 8),
    "swin-errors-3": lambda: static("swin-tiny", 3),
    "over-time": over_time,
    "lemma-1": lemma_1,
    "regret-small": lambda: regret("linear 4x4"),
    "regret-linear": lambda: regret("linear 64x80"),
    "regret-least-squares": lambda: regret("least squares"),
    "regret-logistic": lambda: regret("logistic"),
    "whitened-momentum": whitened_momentum,
}


def filled(text: str) -> str:
    """Return the text of a page with new tables."""
    return _MARKED.sub(lambda match: match[1] + "\n" + TABLES[match[2]]() + "\n" + match[3], text)


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
