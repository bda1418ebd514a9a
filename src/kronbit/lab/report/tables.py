"""The table that a comparison ends with, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kronbit.lab.report.outcomes import (
    Column,
    Outcome,
    explain_steps,
    outcomes,
    shown_columns,
)
from kronbit.lab.report.runs import Run, by_recipe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_table(runs: Sequence[Run], console: Console) -> None:
    """Print a table for every recipe, with as many columns as the terminal is wide.

    Args:
        runs: What to compare; several seeds of one optimizer make one row.
        console: Where to.
    """
    recipes = by_recipe(runs)
    for recipe, own in recipes.items():
        found = outcomes(own)
        columns = shown_columns(found)
        table = _table(found, columns)
        while columns and _width(table, console) > console.width:
            columns.remove(min(columns, key=lambda column: column.importance))
            table = _table(found, columns)
        if len(recipes) > 1:
            console.print(recipe, style="bold", markup=False, highlight=False)
        console.print(table)


def new_table(**options: Any) -> Table:
    """A table of the lab, with a line below its headings alone.

    Args:
        **options: Further ones of rich's table.
    """
    from rich import box
    from rich.table import Table

    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, **options
    )


def _table(found: Sequence[Outcome], columns: Sequence[Column]) -> Table:
    from rich.text import Text

    table = new_table(caption=Text(_note(found, columns), style="dim"), caption_justify="left")
    table.add_column("optimizer", overflow="fold", vertical="bottom")
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True, vertical="bottom")
    for outcome in found:
        # As text: labels may hold what rich takes for markup.
        texts = [outcome.full_label, *(column.text(outcome) for column in columns)]
        table.add_row(*map(Text, texts))
    return table


def _note(found: Sequence[Outcome], columns: Sequence[Column]) -> str:
    """What the table does not explain by itself."""
    notes = []
    if any(column.key == "steps_to_base" for column in columns):
        notes.append(explain_steps(found))
    if any(len(own.counted) > 1 for own in found):
        notes.append("±: the largest distance of a seed from the mean.")
    return " ".join(filter(None, notes))


def _width(table: Table, console: Console) -> int:
    """What the table takes if nothing in it wraps."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=10**4), table).maximum
