"""The table that ``summary()`` returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from kronbit.blocks.batches import UPDATE
from kronbit.blocks.blocking import Route
from kronbit.config import Config
from kronbit.distributed.sharding import local
from kronbit.messages import NamedParameter
from kronbit.reporting.memory import state_bytes
from kronbit.step.schedule import first_preconditioned_step

_COLUMNS = ("parameter", "shape", "blocks", "method", "bits", "bytes", "left to the base because")
_NUMERIC = ("blocks", "bits", "bytes")


def summary(
    title: str, params: list[NamedParameter], route: Route, base: Optimizer, config: Config
) -> str:
    """Return the table of ``SecondOrder.summary``, with totals below."""
    lines: list[tuple[str, ...]] = []
    elements = covered = total = offloaded = 0
    steps: set[int] = set()
    largest = 1
    for name, p, options in params:
        elements += (local(p) if options.blocks == "local" else p).numel()
        shape = " x ".join(map(str, p.shape)) or "scalar"
        blocking = route(p, options) if p.requires_grad else "frozen: requires_grad=False"
        if isinstance(blocking, str):
            lines.append((name, shape, "", "", "", "", blocking))
            continue
        sizes = state_bytes(blocking, options)
        orders = [order for grid in blocking.grids for order in grid.shape]
        size = sum(sizes.values())
        formats = _formats(options, orders)
        lines.append((name, shape, f"{len(blocking)}", *formats, f"{size:,}", ""))
        covered += math.prod(blocking.matrices)
        total += size
        if config.offload_statistics and p.device.type != "cpu":
            offloaded += sizes["statistics"]
        steps.add(first_preconditioned_step(options))
        largest = max([largest, *orders])
    in_host_memory = f", {offloaded:,} of them in the host's memory" if offloaded else ""
    return "\n".join(
        [
            _table(f"{title} around {type(base).__name__}", lines),
            f"{covered:,} of {elements:,} elements ({100 * covered / max(elements, 1):.1f} %) are "
            "preconditioned",
            f"second-order state: {total:,} bytes ({total / 2**20:.1f} MiB){in_host_memory}",
            f"first preconditioned step: {', '.join(map(str, sorted(steps))) or 'never'}",
            f"workspace: {config.workspace_mb:g} MiB; an update at the largest order, {largest}, "
            f"needs about {UPDATE.square * 4 * largest**2 / 2**20:.1f} MiB",
        ]
    )


def _formats(config: Config, orders: Iterable[int]) -> tuple[str, str]:
    """Return the methods and the bits of factors of these orders."""
    formats = [config.format(order) for order in orders]
    methods = {format.method for format in formats}
    bits = {stored.bits for format in formats for stored in (format.statistic, format.root)}
    return "/".join(sorted(methods)), "/".join(map(str, sorted(bits)))


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    columns = []
    for name, *cells in zip(_COLUMNS, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        justify = str.rjust if name in _NUMERIC else str.ljust
        columns.append([justify(cell, width) for cell in (name, "-" * width, *cells)])
    lines = zip(*columns, strict=True)
    return "\n".join([title, *("  ".join(line).rstrip() for line in lines)])
