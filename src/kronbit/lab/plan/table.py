"""A plan as a table for the terminal, with a memory bar per optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kronbit.lab.plan.planning import Plan
from kronbit.lab.plan.rows import CONTEXT, Row
from kronbit.lab.report.numbers import bytes_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


class _Part(NamedTuple):
    """A part of the bar, marked by color and by sign."""

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
_CUT = 1.5  # times the limit: a longer scale makes the other bars too short
_SHORTEST_BAR = 12


class _Column(NamedTuple):
    title: str
    text: Callable[[Row], str]
    at: int  # minimum width of the terminal


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
    """Print a plan over the full width of the terminal.

    Args:
        plan: The plan.
        console: The console to print to.
    """
    from rich.table import Table
    from rich.text import Text

    for line in _title(plan):
        console.print(Text(line))
    known = 1 if plan.gpu_bytes is None else 2 if plan.activations.peak is None else 3
    before, after = (
        [column for column in columns if console.width >= column.at]
        for columns in (_BEFORE, _AFTER[:known])
    )
    scale = _Scale(plan)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for place, column in enumerate(before):
        table.add_column(column.title, justify="right" if place else "left", no_wrap=not place)
    table.add_column(scale, no_wrap=True, ratio=1, min_width=_SHORTEST_BAR)
    for column in after:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in plan.rows:
        texts = [
            Text(column.text(row), "dim" if row.fits is False else "")
            for column in (*before, *after)
        ]
        table.add_row(*texts[: len(before)], _Bar(scale, row), *texts[len(before) :])
    console.print(table)
    signs = [(part.plain if console.options.ascii_only else part.sign, part) for part in _PARTS]
    legend = (Text.assemble((sign, part.style), f" {part.name}") for sign, part in signs)
    console.print(Text("   ").join(legend))
    for line in _sentences(plan):
        console.print(Text(line))


class _Scale:
    """The common scale of the bars; as a header, it prints the limit above its mark."""

    def __init__(self, plan: Plan) -> None:
        self.limit = plan.gpu_bytes
        totals = [row.total for row in plan.rows]
        self.size = max(totals)
        if self.limit is not None:
            self.size = max(self.size, round(1.1 * self.limit))
            if min(totals) < self.limit:
                self.size = min(self.size, round(_CUT * self.limit))

    def place(self, size: int, width: int) -> int:
        """Return the column of a size in a bar of this width."""
        return min(width, round(size * width / self.size))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        if self.limit is None:
            yield Text("memory")
            return
        mark, name = self.place(self.limit, options.max_width), bytes_text(self.limit)
        arrow = "v" if options.ascii_only else "▼"
        fits = mark >= len(name) + 1
        yield Text(f"{name} {arrow}".rjust(mark + 1) if fits else f"{' ' * mark}{arrow} {name}")


class _Bar(NamedTuple):
    """The bar of a row: its parts side by side, cut at the end of the scale."""

    scale: _Scale
    row: Row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        width, plain = options.max_width, options.ascii_only
        bar, held = Text(), 0
        for part in _PARTS:
            held += part.size(self.row)
            sign = part.plain if plain else part.sign
            bar.append(sign * (self.scale.place(held, width) - len(bar)), part.style)
        bar.append(" " * (width - len(bar)))
        if self.row.total > self.scale.size:
            bar = bar[:-1] + Text(">" if plain else "▶", "red")
        mark = width if self.scale.limit is None else self.scale.place(self.scale.limit, width)
        if mark < width:
            bar = bar[:mark] + Text("|" if plain else "│", "bold red") + bar[mark + 1 :]
        yield bar


def _title(plan: Plan) -> Iterator[str]:
    examples = ""
    if plan.batch is not None and plan.shape is not None:
        examples = f", batch {' x '.join(map(str, (plan.batch, *plan.shape)))}"
    yield f"{plan.model}: {plan.parameters_count:,} parameters in {plan.dtype}{examples}"
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
            yield f"Nothing fits {limit}, not even {base.label} alone."
        rows = [row for row in (base, whole, default) if row is not None]
        if base.largest_batch is not None:
            batches = "; ".join(f"{row.label}: {row.largest_batch or 'none'}" for row in rows)
            yield f"Largest batch that fits, of powers of two: {batches}."
        yield (
            f"{bytes_text(CONTEXT)} are reserved for the CUDA context. Fragmentation is not "
            "counted: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces it."
        )
    for note in plan.notes:
        yield f"{note[0].upper()}{note[1:]}."
