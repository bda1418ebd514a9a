"""A plan in the terminal: a bar of memory for every optimizer, against the GPU's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kronbit.lab.plan.planning import Plan
from kronbit.lab.plan.rows import CONTEXT, Row
from kronbit.lab.report.numbers import bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class _Part(NamedTuple):
    """A part of the bar, told from the others by its sign, too."""

    name: str
    sign: str
    plain: str
    style: str
    size: Callable[[Row], int]


_PARTS = (
    _Part("parameters", "█", "P", "blue", lambda row: row.parameters),
    _Part("gradients", "▓", "G", "cyan", lambda row: row.gradients),
    _Part("base", "▒", "B", "green", lambda row: row.base),
    _Part("second order", "▚", "S", "magenta", lambda row: row.statistics + row.roots),
    _Part("activations", "░", "A", "yellow", lambda row: row.activations),
    _Part("workspace", "▖", "W", "white", lambda row: row.workspace),
)
_CUT = 1.5  # times the limit: longer bars would leave no room to tell the others apart
_SHORTEST_BAR = 12


class _Column(NamedTuple):
    title: str
    text: Callable[[Row], str]
    at: int  # least width of the terminal


_BEFORE = (
    _Column("optimizer", lambda row: row.label, 0),
    _Column("2nd order", lambda row: bytes_text(row.second_order), 80),
    _Column("smaller", lambda row: "" if row.ratio is None else f"{row.ratio:.1f} x", 100),
)
_AFTER = (
    _Column("total", lambda row: bytes_text(row.total), 0),
    _Column("fits", lambda row: {None: "", True: "yes", False: "no"}[row.fits], 0),
    _Column("batch up to", lambda row: f"{row.largest_batch or 'none'}", 120),
)


def show(plan: Plan, console: Console) -> None:
    """Print a plan, as wide as the terminal.

    Args:
        plan: The plan.
        console: Where to.
    """
    from rich.table import Table
    from rich.text import Text

    for line in _title(plan):
        console.print(Text(line))
    shown = [[c for c in columns if console.width >= c.at] for columns in (_BEFORE, _AFTER)]
    if plan.gpu_bytes is None:
        shown[1] = [_AFTER[0]]
    elif plan.activations.peak is None:
        shown[1] = [*_AFTER[:2]]
    taken = 0
    for column in (*shown[0], *shown[1]):
        taken += 2 + max(len(column.title), *(len(column.text(row)) for row in plan.rows))
    width = max(_SHORTEST_BAR, console.width - taken)
    ascii_only = console.options.ascii_only
    bars = _Bars(plan, width, ascii_only)

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, column in enumerate(shown[0]):
        table.add_column(column.title, justify="right" if place else "left", no_wrap=not place)
    table.add_column(bars.header(), no_wrap=True, width=width)
    for column in shown[1]:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in plan.rows:
        style = "dim" if row.fits is False else ""
        before = [Text(column.text(row), style) for column in shown[0]]
        after = [Text(column.text(row), style) for column in shown[1]]
        table.add_row(*before, bars.bar(row), *after)
    console.print(table)
    signs = [(part.plain if ascii_only else part.sign, part) for part in _PARTS]
    legend = (Text.assemble((sign, part.style), f" {part.name}") for sign, part in signs)
    console.print(Text("   ").join(legend))
    for line in _sentences(plan):
        console.print(Text(line))


class _Bars:
    """Bars of one scale."""

    def __init__(self, plan: Plan, width: int, ascii_only: bool) -> None:
        self._width, self._ascii, self._limit = width, ascii_only, plan.gpu_bytes
        totals = [row.total for row in plan.rows]
        self._scale = max(totals)
        if self._limit is not None:
            self._scale = max(self._scale, round(1.1 * self._limit))
            if min(totals) < self._limit:
                self._scale = min(self._scale, round(_CUT * self._limit))
        self._mark = None if self._limit is None else self._place(self._limit)

    def _place(self, size: int) -> int:
        return min(self._width, round(size * self._width / self._scale))

    def header(self) -> Text:
        """The limit above its mark."""
        from rich.text import Text

        if self._mark is None:
            return Text("memory")
        name = bytes_text(self._limit)
        arrow = "v" if self._ascii else "▼"
        if self._mark >= len(name) + 1:
            return Text(f"{name} {arrow}".rjust(self._mark + 1))
        return Text(f"{' ' * self._mark}{arrow} {name}")

    def bar(self, row: Row) -> Text:
        """Parts side by side; cut at the end of the scale."""
        from rich.text import Text

        found = Text()
        held = start = 0
        for part in _PARTS:
            held += part.size(row)
            stop = self._place(held)
            found.append((part.plain if self._ascii else part.sign) * (stop - start), part.style)
            start = stop
        found.append(" " * (self._width - start))
        if row.total > self._scale:
            found = found[:-1] + Text(">" if self._ascii else "▶", "red")
        if self._mark is not None and self._mark < self._width:
            mark = Text("|" if self._ascii else "│", "bold red")
            found = found[: self._mark] + mark + found[self._mark + 1 :]
        return found


def _title(plan: Plan) -> Iterator[str]:
    of = ""
    if plan.batch is not None and plan.shape is not None:
        of = f", batch {' x '.join(map(str, (plan.batch, *plan.shape)))}"
    yield f"{plan.model}: {plan.parameters_count:,} parameters in {plan.dtype}{of}"
    held = plan.activations
    if held.peak is None:
        yield f"Activations {held.how}"
    else:
        yield (
            f"Forward and backward: {bytes_text(held.saved)} saved, {bytes_text(held.peak)} at "
            f"most, gradients included ({held.how})"
        )


def _sentences(plan: Plan) -> Iterator[str]:
    base, whole, default = plan.rows[0], plan.row("32"), plan.row("4")
    if plan.activations.peak is None:
        yield "Activations are not in the totals."
    if plan.gpu_bytes is not None:
        best, limit = plan.best(), bytes_text(plan.gpu_bytes)
        if best is not None:
            yield f"The most exact second-order state that fits {limit}: {best.label[2:]}."
        elif base.fits:
            yield f"No second-order state fits {limit}; {base.label} alone does."
        else:
            yield f"Nothing fits {limit}: not even {base.label} alone."
        rows = [row for row in (base, whole, default) if row is not None]
        if base.largest_batch is not None:
            batches = "; ".join(f"{row.label}: {row.largest_batch or 'none'}" for row in rows)
            yield f"Largest batch that fits, of powers of two: {batches}."
        yield (
            f"{bytes_text(CONTEXT)} are left to CUDA itself. Fragmentation comes on top: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it small."
        )
    for note in plan.notes:
        yield f"{note[0].upper()}{note[1:]}."
