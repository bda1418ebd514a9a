"""Tables of quantisation errors for the terminal, with the paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kronbit.lab.quantization.errors import KEPT, Deviation, StorageErrors
from kronbit.lab.quantization.report import ErrorReport
from kronbit.lab.report.numbers import MISSING
from kronbit.lab.report.tables import new_table

_SHOWN = 20  # number of roots of a checkpoint that are shown
_MOST_OF_A_NAME = 34
_NUMBERS = yaml.safe_load(Path(__file__).with_name("printed.yaml").read_text(encoding="utf-8"))
# The paper's numbers by bits, mapping and label: errors of the root, and without its diagonal.
PRINTED: dict[tuple[int, str, str], list[Deviation]] = {
    (bits, mapping, label): [Deviation(*pair) for pair in pairs]
    for bits, mappings in _NUMBERS.items()
    for mapping, labels in mappings.items()
    for label, pairs in labels.items()
}
_LEGEND = (
    "NRE: relative error of the inverse root; °: its angle. Quantised: A the matrix, U its "
    "eigenvectors, C its triangular factor, B the root. Rows below the line: method and storage of "
    "an optimizer, which quantises statistic and root. U is exact before quantisation here; in "
    "training, QR iterations approximate it."
)


def show_errors(report: ErrorReport, console: Console) -> None:
    """Print a report. 80 columns are enough."""
    if report.held:
        _show_held(report, console)
    for study in report.studies:
        for bits, rows in groupby(study.rows, key=lambda row: row.bits):
            of_bits = list(rows)
            # The paper also prints errors without the diagonal; otherwise only the JSON has them.
            for off_diagonal in (False, True) if report.synthetic else (False,):
                root = f"A^(-1/{study.statistic.p})" + " without its diagonal" * off_diagonal
                title = f"{study.name}, {bits} bits: errors of {root}"
                _print(console, title, _table(of_bits, report.synthetic, off_diagonal))
    if report.studies:
        console.print(_LEGEND, style="dim")
    if report.synthetic:
        console.print("paper: its printed numbers, for order 1200.", style="dim")
    if any(study.quantized_to for study in report.studies):
        console.print(
            "These statistics were already quantised and count as exact here. Use a 32-bit run to "
            "measure the whole error.",
            style="dim",
        )


def _print(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, style="bold"), table, "", sep="\n")  # Text: no markup in brackets


def _show_held(report: ErrorReport, console: Console) -> None:
    worst = sorted(report.held, key=lambda held: held.whole.nre if held.whole else -1, reverse=True)
    worst = worst[:_SHOWN]
    behind = any(held.refreshed for held in worst)
    table = new_table()
    table.add_column("preconditioner", overflow="fold", max_width=_MOST_OF_A_NAME)
    for name in ("order", "method", "condition", "NRE", "°", *(("now", "°") if behind else ())):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for held in worst:
        condition = MISSING if held.condition is None else f"{held.condition:.0e}"
        bits = f"{held.bits}" + f"+{held.root_bits}" * (held.root_bits != held.bits)
        now = _texts(held.refreshed or held.whole) if behind else ()
        about = str(held.order), f"{held.method} {bits}", condition
        table.add_row(Text(held.name), *about, *_texts(held.whole), *now)
    _print(console, f"Inverse roots in {report.source}", table)
    rest = len(report.held) - len(worst)
    if rest:
        console.print(f"Only the {_SHOWN} largest errors are shown; the JSON has {rest} more.")
    fresh = sum(held.whole is None for held in report.held)
    if fresh:
        console.print(f"{fresh} of {len(report.held)} have not been refreshed yet.")
    if behind:
        console.print(
            "Statistics were updated since the last refresh. now: errors after a refresh now.",
            style="dim",
        )


def _table(rows: Sequence[StorageErrors], synthetic: bool, off_diagonal: bool) -> Table:
    """Create a table with a row per quantised quantity and columns per mapping."""
    mappings = dict.fromkeys(row.mapping for row in rows)
    part = "off_diagonal" if off_diagonal else "whole"
    errors = {(row.mapping, row.label): getattr(row, part) for row in rows}
    printed = {
        (mapping, label): pair[off_diagonal]
        for (bits, mapping, label), pair in PRINTED.items()
        if synthetic and bits == rows[0].bits and len(pair) > off_diagonal
    }
    table = new_table()
    table.add_column("\nquantised", no_wrap=True)
    for heading in (text for mapping in mappings for text in (f"{mapping}\nNRE", "\n°")):
        table.add_column(heading, justify="right", no_wrap=True)
        if printed:
            table.add_column("\npaper", justify="right", no_wrap=True, style="dim")
    for label in dict.fromkeys(label for _, label in errors):
        if label == ", ".join(KEPT[0]):
            table.add_section()
        cells: list[str] = []
        for mapping in mappings:
            measured = _texts(errors[mapping, label])
            of_paper = _texts(printed.get((mapping, label)), missing="")
            cells += chain(*zip(measured, of_paper, strict=True)) if printed else measured
        table.add_row(label, *cells)
    return table


def _texts(errors: Deviation | None, missing: str = MISSING) -> Sequence[str]:
    """Format NRE and angle."""
    if errors is None:
        return missing, missing
    return f"{errors.nre:.4f}", f"{errors.angle:.2f}"
