"""Tables of quantisation errors for the terminal, with the paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from kronbit.lab.quantisation.errors import KEPT, Deviation, Row, label_of
from kronbit.lab.quantisation.report import ErrorReport, HeldErrors
from kronbit.lab.report.numbers import MISSING
from kronbit.lab.report.tables import new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SHOWN = 20  # number of roots of a checkpoint that are shown
_MOST_OF_A_NAME = 34

# The paper's numbers for its synthetic matrix A2: NRE and angle of A^(-1/4), and the same without
# the diagonal, by bits, mapping, quantised quantity and rectification.
PRINTED: dict[tuple[int, str, str, bool | None], tuple[Deviation, Deviation | None]] = {
    (bits, mapping, way, rectified): (Deviation(*whole), Deviation(*off) if off else None)
    for bits, mapping, way, rectified, whole, off in (
        (4, "dt", "A", None, (0.4615, 17.189), (0.6247, 25.913)),
        (4, "dt", "U", False, (0.1224, 7.0144), (0.1994, 11.444)),
        (4, "dt", "U", True, (0.0878, 4.9960), (0.1427, 8.1415)),
        (4, "dt", "B", None, (0.0853, 4.8914), (0.1391, 7.9813)),
        (4, "dt", "A, B", None, (0.4649, 17.650), (0.6314, 26.948)),
        (4, "dt", "U, B", False, (0.1485, 8.5168), (0.2420, 13.911)),
        (4, "dt", "U, B", True, (0.1224, 6.9817), (0.1992, 11.393)),
        (4, "linear2", "A", None, (0.4465, 15.338), (0.6010, 20.780)),
        (4, "linear2", "U", False, (0.0942, 5.3998), (0.1534, 8.8027)),
        (4, "linear2", "U", True, (0.0669, 3.8166), (0.1088, 6.2176)),
        (4, "linear2", "B", None, (0.0661, 3.7887), (0.1078, 6.1755)),
        (4, "linear2", "A, B", None, (0.4483, 15.654), (0.6047, 21.666)),
        (4, "linear2", "U, B", False, (0.1150, 6.5901), (0.1873, 10.745)),
        (4, "linear2", "U, B", True, (0.0941, 5.3716), (0.1532, 8.7534)),
        (8, "dt", "A", None, (0.1896, 10.877), None),
        (8, "linear2", "A", None, (0.1310, 7.4717), None),
    )
}


def show_errors(report: ErrorReport, console: Console) -> None:
    """Print a report.

    Args:
        report: The report.
        console: Console to print to. 80 columns are enough.
    """
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
        console.print("paper: the numbers printed there, for order 1200.", style="dim")
    if any(study.quantized_to for study in report.studies):
        console.print(
            "These statistics were already quantised and count as exact here. Use a 32-bit run to "
            "measure the whole error.",
            style="dim",
        )


_LEGEND = (
    "NRE: relative error of the inverse root; °: its angle. Quantised: A the matrix, U its "
    "eigenvectors, C its triangular factor, B the root. Rows below the line: method and storage of "
    "an optimizer, which quantises statistic and root. U is exact before quantisation here; in "
    "training, QR iterations approximate it."
)


def _print(console: Console, title: str, table: Table) -> None:
    from rich.text import Text

    console.print(Text(title, style="bold"))  # Text, because rich would read brackets as markup
    console.print(table)
    console.print()


def _show_held(report: ErrorReport, console: Console) -> None:
    from rich.text import Text

    worst = sorted(report.held, key=_error, reverse=True)[:_SHOWN]
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


def _error(held: HeldErrors) -> float:
    return -1.0 if held.whole is None else held.whole.nre


def _table(rows: Sequence[Row], synthetic: bool, off_diagonal: bool) -> Table:
    """Create a table with a row per quantised quantity and columns per mapping."""
    mappings = list(dict.fromkeys(row.mapping for row in rows))
    part = "off_diagonal" if off_diagonal else "whole"
    errors = {(row.mapping, row.key): getattr(row, part) for row in rows}
    printed = {
        (mapping, (way, rectified)): pair[off_diagonal]
        for (bits, mapping, way, rectified), pair in PRINTED.items()
        if synthetic and bits == rows[0].bits and pair[off_diagonal]
    }
    table = new_table()
    table.add_column("\nquantised", no_wrap=True)
    for heading in (text for mapping in mappings for text in (f"{mapping}\nNRE", "\n°")):
        table.add_column(heading, justify="right", no_wrap=True)
        if printed:
            table.add_column("\npaper", justify="right", no_wrap=True, style="dim")
    keys = list(dict.fromkeys(row.key for row in rows))
    kept = {(f"{method}, {storage}", None) for method, storage in KEPT}
    first_kept = next(filter(kept.__contains__, keys), None)
    for key in keys:
        if key == first_kept:
            table.add_section()
        cells: list[str] = []
        for mapping in mappings:
            measured = _texts(errors[mapping, key])
            of_paper = _texts(printed.get((mapping, key)), missing="")
            cells += (
                chain.from_iterable(zip(measured, of_paper, strict=True)) if printed else measured
            )
        table.add_row(label_of(key), *cells)
    return table


def _texts(errors: Deviation | None, missing: str = MISSING) -> Sequence[str]:
    """Format NRE and angle."""
    if errors is None:
        return missing, missing
    return f"{errors.nre:.4f}", f"{errors.angle:.2f}"
