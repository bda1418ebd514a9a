"""The page of a report: ``page.html.jinja`` with its style, filled with tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A number in a table.

    Attributes:
        key: What it is, for who reads the page by program.
        value: The number as it was measured; None where there is none.
        text: How it reads.
        best: Whether it is the one to look at.
    """

    key: str
    value: float | None
    text: str
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: What programs find it by.
        heading: Its name for people.
        cells: Its numbers.
    """

    name: str
    heading: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """A table of numbers, which scrolls by itself where the window is narrow.

    Attributes:
        caption: What it shows.
        headings: Of all columns; a line break starts a new line.
        rows: Its rows.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Row]


def render_page(**content: Any) -> str:
    """Fill the template; every text is escaped, and a missing one is an error.

    Args:
        **content: What the template names.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(content)
