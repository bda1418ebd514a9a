"""The HTML page of a report, rendered from ``page.html.jinja`` and ``report.css``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kronbit.lab.report.outcomes import Column


@dataclass(frozen=True)
class NumberTable:
    """A table of numbers, which scrolls horizontally in a narrow window.

    Attributes:
        caption: Caption above the table.
        columns: Columns of the table.
        rows: Runs or outcomes, each after its key for programs that read the page.
        best: The number to highlight, by key of its column.
    """

    caption: str
    columns: Sequence[Column[Any]]
    rows: Sequence[tuple[str, Any]]
    best: Mapping[str, float] = field(default_factory=dict)


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
