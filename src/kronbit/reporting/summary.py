"""The table that ``summary()`` returns."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from kronbit.blocks.batches import UPDATE
from kronbit.blocks.blocking import Blocking
from kronbit.config import Config
from kronbit.distributed.sharding import local
from kronbit.messages import parameter_name
from kronbit.reporting.memory import state_bytes
from kronbit.step.schedule import first_preconditioned_step

# Name, parameter, options.
Row: TypeAlias = tuple[str, Tensor, Config]

_COLUMNS = ("parameter", "shape", "blocks", "method", "bits", "bytes", "left to the base because")
_NUMERIC = (False, False, True, False, True, True, False)


@dataclass(frozen=True)
class _Preconditioned:
    """A preconditioned parameter, and the bytes of its statistics and roots."""

    p: Tensor
    config: Config
    blocking: Blocking
    sizes: Mapping[str, int]

    @property
    def orders(self) -> list[int]:
        """Orders of the factors, one for each side of a grid."""
        return [order for grid in self.blocking.grids for order in grid.shape]

    def cells(self) -> tuple[str, ...]:
        """Return its cells of the table: blocks, method, bits, bytes."""
        formats = [self.config.format(order) for order in self.orders]
        methods = {format.method for format in formats}
        bits = {stored.bits for format in formats for stored in (format.statistic, format.root)}
        joined = ("/".join(map(str, sorted(values))) for values in (methods, bits))
        return f"{len(self.blocking)}", *joined, f"{sum(self.sizes.values()):,}", ""


def rows(
    groups: Iterable[Mapping[str, Any]], config_of: Callable[[Mapping[str, Any]], Config]
) -> list[Row]:
    """Return all parameters of param groups, each once, with their names and options."""
    by_parameter = {
        p: (parameter_name(group, index, number), p, config_of(group))
        for index, group in enumerate(groups)
        for number, p in enumerate(group["params"])
    }
    return list(by_parameter.values())


def summary(
    title: str,
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
    base: Optimizer,
    config: Config,
) -> str:
    """Return the table of ``SecondOrder.summary``, with totals below."""
    lines: list[tuple[str, ...]] = []
    preconditioned: list[_Preconditioned] = []
    for name, p, options in params:
        shape = " x ".join(map(str, p.shape)) or "scalar"
        blocking = route(p, options) if p.requires_grad else "frozen: requires_grad=False"
        if isinstance(blocking, str):
            lines.append((name, shape, "", "", "", "", blocking))
        else:
            sizes = state_bytes(blocking, options)
            preconditioned.append(_Preconditioned(p, options, blocking, sizes))
            lines.append((name, shape, *preconditioned[-1].cells()))
    elements = sum(
        (local(p) if options.blocks == "local" else p).numel() for _, p, options in params
    )
    table = _table(f"{title} around {type(base).__name__}", lines)
    return "\n".join([table, *_totals(preconditioned, elements, config)])


def _totals(params: Sequence[_Preconditioned], elements: int, config: Config) -> list[str]:
    covered = sum(math.prod(param.blocking.matrices) for param in params)
    total = sum(sum(param.sizes.values()) for param in params)
    offloaded = sum(
        param.sizes["statistics"]
        for param in params
        if config.offload_statistics and param.p.device.type != "cpu"
    )
    in_host_memory = f", {offloaded:,} of them in the host's memory" if offloaded else ""
    steps = sorted({first_preconditioned_step(param.config) for param in params})
    order = max((order for param in params for order in param.orders), default=1)
    return [
        f"{covered:,} of {elements:,} elements ({100 * covered / max(elements, 1):.1f} %) are "
        "preconditioned",
        f"second-order state: {total:,} bytes ({total / 2**20:.1f} MiB){in_host_memory}",
        f"first preconditioned step: {', '.join(map(str, steps)) or 'never'}",
        f"workspace: {config.workspace_mb:g} MiB; an update at the largest order, {order}, needs "
        f"about {UPDATE.square * 4 * order**2 / 2**20:.1f} MiB",
    ]


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a rich table if rich is installed, else plain text."""
    if importlib.util.find_spec("rich") is None:
        return _plain_table(title, rows)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column, numeric in zip(_COLUMNS, _NUMERIC, strict=True):
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # names are text, not markup
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _plain_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    cells = [
        [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, _NUMERIC, strict=True)
        ]
        for line in lines
    ]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join([title, *("  ".join(line).rstrip() for line in cells)])
