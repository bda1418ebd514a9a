"""Pieces of an HTML page that needs nothing from elsewhere: no script, no style, no image."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1f242b;
  --soft: #5c6370; --line: #dfe3e8; --accent: #b4631a; --code: #eef0f3; --best: #fdf1e4; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1d2126; --ink: #e4e7eb;
  --soft: #9ba3ae; --line: #343a42; --accent: #f0a35e; --code: #272c33; --best: #3a2c1c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2rem clamp(0.9rem, 3vw, 2rem) 4rem; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 0.4rem; }
h2 { font-size: 1.4rem; margin: 2.8rem 0 0.3rem; padding-top: 1.2rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 2rem 0 0.7rem; }
h1, h2, h3, p, li, dd, summary, figcaption { overflow-wrap: anywhere; }
p { margin: 0.3rem 0 0.8rem; }
.soft { color: var(--soft); }
pre { background: var(--code); border-radius: 6px; padding: 0.6rem 0.8rem; margin: 0.5rem 0 1rem;
  font: 0.85rem/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace;
  overflow-x: auto; }
.tiles { display: grid; gap: 0.8rem; grid-template-columns: repeat(auto-fit, minmax(155px, 1fr));
  margin: 1rem 0 1.4rem; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.8rem 1rem; }
.tiles b { display: block; font-size: 1.6rem; line-height: 1.25; color: var(--accent);
  font-variant-numeric: tabular-nums; }
.tiles span { display: block; font-size: 0.85rem; }
.table { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; margin: 0.8rem 0 1.4rem; }
.table:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0.7rem 0.9rem 0.5rem; color: var(--soft);
  font-size: 0.85rem; }
caption span { display: block; position: sticky; left: 0.9rem; max-width: calc(100vw - 4rem); }
th, td { padding: 0.42rem 0.6rem; text-align: right; white-space: nowrap;
  border-top: 1px solid var(--line); }
thead th { vertical-align: bottom; font-weight: 600; color: var(--soft); border-top: 0;
  font-size: 0.82rem; line-height: 1.3; }
th:first-child, td:first-child { text-align: left; padding-left: 0.9rem; }
tbody th { font-weight: 600; }
td.best { background: var(--best); font-weight: 600; }
.plain td, .plain th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.plain th { width: 35%; font-weight: 400; color: var(--soft); }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  overflow: hidden; display: flex; flex-direction: column; }
figure div { background: #fff; padding: 0.8rem; flex: 1; display: flex; align-items: center; }
figure img { display: block; max-width: 100%; width: 100%; height: auto; }
figcaption { padding: 0.7rem 1rem 0.8rem; font-size: 0.85rem; color: var(--soft);
  border-top: 1px solid var(--line); }
figcaption strong { display: block; color: var(--ink); font-size: 0.95rem; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 0.6rem 0; padding: 0 1rem; }
details > summary { cursor: pointer; padding: 0.6rem 0; font-weight: 600; }
details[open] { padding-bottom: 0.6rem; }
details details { border-width: 1px 0 0; border-radius: 0; padding: 0; }
dl { display: grid; grid-template-columns: minmax(6rem, auto) 1fr; gap: 0.25rem 1rem; margin: 0;
  font-size: 0.9rem; }
dt { color: var(--soft); }
dd { margin: 0; }
@media (max-width: 520px) {
  tbody th { white-space: normal; min-width: 8.5rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin: 0 0 0.5rem; }
}
@media print { details, figure, .tiles li { break-inside: avoid; } }
"""


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

    def html(self) -> str:
        """The cell of the table, its exact number in ``data-value``."""
        value = "" if self.value is None else f' data-value="{json.dumps(self.value)}"'
        best = ' class="best"' if self.best else ""
        return f'<td data-key="{escape(self.key)}"{value}{best}>{escape(self.text)}</td>'


def page(title: str, body: str) -> str:
    """A whole page.

    Args:
        title: Of the browser's window.
        body: What stands in it, as HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(
    caption: str, headings: Iterable[str], rows: Iterable[tuple[str, str, Sequence[Cell]]]
) -> str:
    """A table of numbers, which scrolls by itself where the window is narrow.

    Args:
        caption: What it shows.
        headings: Of all columns; a line break starts a new line.
        rows: For each the name that programs find it by, its heading, and its cells.
    """
    heads = "".join(
        f'<th scope="col">{escape(heading.strip()).replace(chr(10), "<br>")}</th>'
        for heading in headings
    )
    lines = "\n".join(
        f'<tr data-row="{escape(name)}"><th scope="row">{escape(heading)}</th>'
        f"{''.join(cell.html() for cell in cells)}</tr>"
        for name, heading, cells in rows
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">\n<table>\n'
        f"<caption><span>{escape(caption)}</span></caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>"
    )


def settings_table(caption: str, settings: Mapping[str, Any]) -> str:
    """A table of names and values.

    Args:
        caption: What they are.
        settings: The values, as text or as anything that JSON can say.
    """
    lines = "\n".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(_as_text(value))}</td></tr>'
        for name, value in settings.items()
    )
    return (
        f'<div class="table plain">\n<table>\n<caption><span>{escape(caption)}</span></caption>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>"
    )


def image_figure(title: str, caption: str, alt: str, png: bytes) -> str:
    """A figure whose image is part of the page.

    Args:
        title: What it shows.
        caption: How to read it.
        alt: Its content in words.
        png: The image; the first bytes of a PNG say its size.
    """
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    data = base64.b64encode(png).decode()
    return (
        f'<figure>\n<div><img src="data:image/png;base64,{data}" width="{width}" height="{height}"'
        f' alt="{escape(alt)}"></div>\n<figcaption><strong>{escape(title)}</strong> '
        f"{escape(caption)}</figcaption>\n</figure>"
    )


def folded(heading: str, body: str, name: str = "") -> str:
    """Something that opens when it is asked for.

    Args:
        heading: What it is.
        body: Its HTML.
        name: For links to it.
    """
    own = f' id="{escape(name)}"' if name else ""
    return f"<details{own}>\n<summary>{escape(heading)}</summary>\n{body}\n</details>"


def facts(pairs: Mapping[str, str]) -> str:
    """Names and what is known of them; those with nothing are left out.

    Args:
        pairs: As text.
    """
    lines = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs.items() if value
    )
    return f"<dl>\n{lines}\n</dl>"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
