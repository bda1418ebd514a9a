"""What an optimizer says of itself: the summary's table, and the diagnostics."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from kronbit.blocks.batches import UPDATE
from kronbit.blocks.blocking import Blocking
from kronbit.config import Config
from kronbit.distributed.sharding import local
from kronbit.messages import parameter_name
from kronbit.reporting.memory import state_bytes
from kronbit.step.schedule import first_preconditioned_step

if TYPE_CHECKING:
    pass

# A parameter with its name and its options.
Row: TypeAlias = tuple[str, Tensor, Config]

_COLUMNS = ("parameter", "shape", "blocks", "method", "bits", "bytes", "left to the base because")
_NUMERIC = (False, False, True, False, True, True, False)


def rows(
    groups: Iterable[Mapping[str, Any]], config_of: Callable[[Mapping[str, Any]], Config]
) -> list[Row]:
    """All parameters of param groups, each once."""
    found = {
        p: (parameter_name(group, index, number), p, config_of(group))
        for index, group in enumerate(groups)
        for number, p in enumerate(group["params"])
    }
    return list(found.values())


def summary(
    title: str,
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
    base: Optimizer,
    config: Config,
) -> str:
    """The table of ``SecondOrder.summary``."""
    rows: list[tuple[str, ...]] = []
    total, elements, preconditioned, offloaded = 0, 0, 0, 0
    steps = set()
    orders = [1]
    for name, p, own in params:
        shape = " x ".join(map(str, p.shape)) or "scalar"
        elements += (local(p) if own.blocks == "local" else p).numel()
        way = route(p, own) if p.requires_grad else "frozen: requires_grad=False"
        if isinstance(way, str):
            rows.append((name, shape, "", "", "", "", way))
            continue
        formats = [own.format(order) for grid in way.grids for order in grid.shape]
        methods = sorted({format.method for format in formats})
        bits = sorted({own.bits for format in formats for own in (format.statistic, format.root)})
        held = state_bytes(way, own)
        size = sum(held.values())
        total, preconditioned = total + size, preconditioned + math.prod(way.matrices)
        if config.offload_statistics and p.device.type != "cpu":
            offloaded += held["statistics"]
        steps.add(first_preconditioned_step(own))
        orders += [order for grid in way.grids for order in grid.shape]
        rows.append(
            (
                name,
                shape,
                f"{len(way)}",
                "/".join(methods),
                "/".join(map(str, bits)),
                f"{size:,}",
                "",
            )
        )
    share = 100 * preconditioned / max(elements, 1)
    one = UPDATE.square * 4 * max(orders) ** 2 / 2**20
    footer = [
        f"{preconditioned:,} of {elements:,} elements ({share:.1f} %) are preconditioned",
        f"second-order state: {total:,} bytes ({total / 2**20:.1f} MiB)"
        + (f", {offloaded:,} of them in the host's memory" if offloaded else ""),
        f"first preconditioned step: {', '.join(map(str, sorted(steps))) or 'never'}",
        f"workspace: {config.workspace_mb:g} MiB; an update at the largest order, {max(orders)}, "
        f"needs about {one:.1f} MiB",
    ]
    return "\n".join([_table(f"{title} around {type(base).__name__}", rows), *footer])


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A rich table where rich is installed, plain text otherwise."""
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
