"""A plan as a table for the terminal, with a memory bar per optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from kronbit.lab.plan.planning import Plan
from kronbit.lab.plan.rows import CONTEXT, Row
from kronbit.lab.report.numbers import bytes_text

# Part of a row -> its sign in the bar, the same in ASCII, and its style.
_SIGNS = {
    "parameters": ("█", "P", "blue"),
    "gradients": ("▓", "G", "cyan"),
    "base": ("▒", "B", "green"),
    "second order": ("▚", "S", "magenta"),
    "activations": ("░", "A", "yellow"),
    "workspace": ("▖", "W", "white"),
}
_CUT = 1.5  # times the limit: a longer scale makes the other bars too short
_SHORTEST_BAR = 12


# Left and right of the bar: title, minimum width of the terminal, text of a row.
_Columns: TypeAlias = tuple[tuple[str, int, Callable[[Row], str]], ...]
_LEFT: _Columns = (
    ("optimizer", 0, lambda row: row.label),
    ("2nd order", 80, lambda row: bytes_text(row.second_order)),
    ("smaller", 100, lambda row: "" if row.ratio is None else f"{row.ratio:.1f} x"),
)
_RIGHT: _Columns = (
    ("total", 0, lambda row: bytes_text(row.total)),
    ("fits", 0, lambda row: {None: "", True: "yes", False: "no"}[row.fits]),
    ("batch up to", 120, lambda row: f"{row.largest_batch or 'none'}"),
)


def show(plan: Plan, console: Console) -> None:
    """Print a plan over the full width of the terminal."""
    for line in _title(plan):
        console.print(Text(line))
    known = 1 if plan.gpu_bytes is None else 2 if plan.activations.peak is None else 3
    left, right = (
        [(title, text) for title, at, text in columns if console.width >= at]
        for columns in (_LEFT, _RIGHT[:known])
    )
    size = max(row.total for row in plan.rows)
    if plan.gpu_bytes is not None:
        size = max(size, round(1.1 * plan.gpu_bytes))
        if min(row.total for row in plan.rows) < plan.gpu_bytes:
            size = min(size, round(_CUT * plan.gpu_bytes))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for place, (title, _) in enumerate(left):
        table.add_column(title, justify="right" if place else "left", no_wrap=not place)
    table.add_column(_Bar(size, plan.gpu_bytes), no_wrap=True, ratio=1, min_width=_SHORTEST_BAR)
    for title, _ in right:
        table.add_column(title, justify="right", no_wrap=True)
    for row in plan.rows:
        texts = [Text(text(row), "dim" if row.fits is False else "") for _, text in left + right]
        table.add_row(*texts[: len(left)], _Bar(size, plan.gpu_bytes, row), *texts[len(left) :])
    console.print(table)
    plain = console.options.ascii_only
    legend = (Text.assemble((signs[plain], signs[2]), f" {name}") for name, signs in _SIGNS.items())
    console.print(Text("   ").join(legend))
    for line in _sentences(plan):
        console.print(Text(line))


@dataclass(frozen=True)
class _Bar:
    """The parts of a row side by side; without a row, a header with the limit at its mark."""

    size: int  # bytes at the end of the scale, which all rows share; longer bars are cut there
    limit: int | None  # memory of the GPU in bytes, marked in each bar
    row: Row | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width, plain = options.max_width, options.ascii_only

        def place(size: int) -> int:
            return min(width, round(size * width / self.size))

        mark = width if self.limit is None else place(self.limit)
        if self.row is None:
            name, arrow = bytes_text(self.limit), "v" if plain else "▼"
            before, after = f"{name} {arrow}".rjust(mark + 1), f"{' ' * mark}{arrow} {name}"
            text = before if mark > len(name) else after
            yield Text("memory" if self.limit is None else text)
            return
        bar, held = Text(), 0
        for name, size in self.row.parts.items():
            held += size
            bar.append(_SIGNS[name][plain] * (place(held) - len(bar)), _SIGNS[name][2])
        bar.append(" " * (width - len(bar)))
        if held > self.size:
            bar = bar[:-1] + Text(">" if plain else "▶", "red")
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
            yield f"The most exact second-order state that fits in {limit}: {best.label[2:]}."
        elif base.fits:
            yield f"No second-order state fits in {limit}; {base.label} alone does."
        else:
            yield f"Nothing fits in {limit}, not even {base.label} alone."
        if base.largest_batch is not None:
            rows = (row for row in (base, whole, default) if row is not None)
            batches = "; ".join(f"{row.label}: {row.largest_batch or 'none'}" for row in rows)
            yield f"Largest batch that fits, of powers of two: {batches}."
        yield (
            f"{bytes_text(CONTEXT)} are reserved for the CUDA context. Fragmentation is not "
            "counted: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces it."
        )
    for note in plan.notes:
        yield f"{note[0].upper()}{note[1:]}."
