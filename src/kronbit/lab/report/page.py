"""The HTML page of a report, rendered from ``page.html.jinja`` and ``report.css``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        key: Key of the number, for programs that read the page.
        value: The measured number, or None if there is none.
        text: Displayed text.
        best: True if the cell is highlighted as the best of its column.
    """

    key: str
    value: float | None
    text: str
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
        name: Key of the row, for programs that read the page.
        heading: Displayed name.
        cells: The cells of the row.
    """

    name: str
    heading: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class NumberTable:
    """A table of numbers, which scrolls horizontally in a narrow window.

    Attributes:
        caption: Caption above the table.
        headings: Column headings. A line break in one becomes a line break on the page.
        rows: The rows of the table.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[TableRow]


def render_page(**content: Any) -> str:
    """Render the template. All text is escaped, and a missing variable raises an error.

    Args:
        **content: Variables of the template.
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
