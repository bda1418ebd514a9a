"""The table of a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kronbit.lab.report.outcomes import Column, Outcome, explain_steps, outcomes, shown_columns
from kronbit.lab.report.runs import Run, by_recipe


def show_table(runs: Sequence[Run], console: Console) -> None:
    """Print a table for every recipe, with as many columns as the terminal has room for."""
    recipes = by_recipe(runs)
    unlimited = console.options.update(width=10**4)
    for recipe, runs_of_recipe in recipes.items():
        compared = outcomes(runs_of_recipe)
        columns = shown_columns(compared)
        table = _table(compared, columns)
        while columns and console.measure(table, options=unlimited).maximum > console.width:
            columns.remove(min(columns, key=lambda column: column.importance))
            table = _table(compared, columns)
        if len(recipes) > 1:
            console.print(recipe, style="bold", markup=False, highlight=False)
        console.print(table)


def new_table(**options: Any) -> Table:
    """Create a table whose only line is the one below its headings."""
    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, **options
    )


def _table(compared: Sequence[Outcome], columns: Sequence[Column]) -> Table:
    notes = []
    if any(column.key == "steps_to_base" for column in columns):
        notes.append(explain_steps(compared))
    if any(len(outcome.counted) > 1 for outcome in compared):
        notes.append("±: largest distance of a seed from the mean.")
    note = Text(" ".join(filter(None, notes)), style="dim")
    table = new_table(caption=note, caption_justify="left")
    table.add_column("optimizer", overflow="fold", vertical="bottom")
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True, vertical="bottom")
    for outcome in compared:
        # Text, because rich would interpret brackets in a label as markup.
        texts = [outcome.full_label, *(column.text(outcome) for column in columns)]
        table.add_row(*map(Text, texts))
    return table
