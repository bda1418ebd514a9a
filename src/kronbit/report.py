"""What an optimizer says of itself: the summary's table, and the diagnostics."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit.acceleration import why_not
from kronbit.batches import UPDATE
from kronbit.blocking import Blocking
from kronbit.config import Config
from kronbit.distributed.placements import local
from kronbit.factors import Factors
from kronbit.groups import Group
from kronbit.memory import state_bytes
from kronbit.nonfinite import NonfiniteGuard
from kronbit.plan import Plan
from kronbit.warning import warn

if TYPE_CHECKING:
    from kronbit.distributed.ranks import Ranks

# A parameter with its name and its options.
Row: TypeAlias = tuple[str, Tensor, Config]

_FLATTENED = 2**16  # elements of a vector that must have been matrices
_COLUMNS = ("parameter", "shape", "blocks", "method", "bits", "bytes", "left to the base because")
_NUMERIC = (False, False, True, False, True, True, False)


def parameter_name(group: Mapping[str, Any], index: int, number: int) -> str:
    """The name that the parameter was given with, or its place in the param groups."""
    names = group.get("param_names")
    return names[number] if names else f"group {index}, parameter {number}"


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
        steps.add(own.first_preconditioned_step())
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


def warn_of_fresh_starts(
    params: Sequence[Row], route: Callable[[Tensor, Config], Blocking | str]
) -> None:
    """Warn of parameters without state that will be preconditioned."""
    fresh = [
        name for name, p, own in params if p.requires_grad and isinstance(route(p, own), Blocking)
    ]
    if fresh:
        warn(
            f"the checkpoint has no state of {len(fresh)} preconditioned parameter(s), such as "
            f"{fresh[0]}: they start fresh"
        )


def warn_of_lost_roots(names: Sequence[str]) -> None:
    """Warn of parameters that should be preconditioned by now, but in the checkpoint are not."""
    if names:
        warn(
            f"the checkpoint has no roots of {len(names)} parameter(s), such as {names[0]}, "
            "although their first refresh should be past: they go on as before it. A full state "
            "dict of sharded parameters, by torch or by a trainer, keeps only what the first rank "
            "owns: save sharded ones (SHARDED_STATE_DICT), or by kronbit.consolidate_state_dict"
        )


def warn_of_few(
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
    summary: Callable[[], str],
) -> None:
    """Warn if less than half of what could be preconditioned is: flattened matrices, say."""
    possible = preconditioned = 0
    flat = ""
    for name, p, own in params:
        vector = sum(size > 1 for size in p.shape) < 2
        if not p.requires_grad or not own.precondition or (vector and p.numel() < _FLATTENED):
            continue
        possible += p.numel()
        preconditioned += p.numel() * isinstance(route(p, own), Blocking)
        if vector and not flat:
            flat = (
                f"{name} is a vector of {p.numel():,}: if DeepSpeed or FSDP 1 has flattened "
                "matrices, use fully_shard (FSDP2) or DistributedDataParallel. "
            )
    if 2 * preconditioned < possible:
        warn(
            f"only {100 * preconditioned / possible:.1f} % of {possible:,} elements are "
            f"preconditioned. {flat}precondition=False says what is meant to be left to the base. "
            f"{summary()}"
        )


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


def diagnostics(
    plan: Plan | None,
    guards: Mapping[torch.device, NonfiniteGuard],
    ranks: Ranks | None,
    missed: Mapping[str, int],
    past: Mapping[str, int],
) -> dict[str, Any]:
    """What ``SecondOrder.diagnostics`` shows.

    Args:
        plan: The state, if there is one.
        guards: Those who look at gradients.
        ranks: Other ranks, if they have been looked for.
        missed: What statistics have missed.
        past: Counters of earlier plans.
    """
    skipped = sum(int(guard.skipped) for guard in guards.values())
    counts = {"skipped_gradients": skipped, **fallback_counts(plan), **missed}
    for name, count in past.items():
        counts[name] += count
    return {
        **counts,
        **acceleration_figures(plan, guards),
        "ranks": {} if ranks is None else ranks.figures(),
        "groups": group_figures(plan),
    }


def fallback_counts(plan: Plan | None) -> dict[str, int]:
    """How often something was refused or repaired, over all groups. Waits for the device."""
    counts = dict.fromkeys((*Factors.COUNTERS, "ungrafted"), 0)
    for preconditioner in plan.preconditioners.values() if plan else ():
        counts["ungrafted"] += int(preconditioner.ungrafted)
        for group in preconditioner.groups:
            for name, count in _counts(group).items():
                counts[name] += count
    return counts


def acceleration_figures(
    plan: Plan | None, guards: Mapping[torch.device, NonfiniteGuard]
) -> dict[str, Any]:
    """What runs by kernels and graphs, and why not; how many parameters take products how."""
    preconditioners = plan.preconditioners if plan else {}
    products: Counter[int] = Counter()
    for preconditioner in preconditioners.values():
        products.update(preconditioner.products.ways[i] for i in preconditioner.refreshed)
    refused = {device: own.graph_refused() for device, own in preconditioners.items()}
    for device in refused.keys() & guards.keys():
        refused[device] = refused[device] or guards[device].graph_refused()
    return {
        "kernels": {str(device): why_not(device) or "used" for device in preconditioners},
        "cuda_graph": {str(device): reason or "not refused" for device, reason in refused.items()},
        "products": dict(products),
    }


def _counts(group: Group) -> dict[str, int]:
    sides = (group.left, group.right)
    return {name: sum(int(side.counters[name]) for side in sides) for name in Factors.COUNTERS}


def group_figures(plan: Plan | None) -> list[dict[str, Any]]:
    """Figures of every group of blocks. Waits for the device."""
    figures = []
    for device, preconditioner in plan.preconditioners.items() if plan else ():
        for group in preconditioner.groups:
            ratio = preconditioner.graft_ratio[group.owner]
            figures.append(
                {
                    "device": str(device),
                    "shape": group.shape,
                    "blocks": len(group.owner),
                    "left": _side(group.left),
                    "right": _side(group.right),
                    "graft_ratio": (float(ratio.min()), float(ratio.max())),
                    **_counts(group),
                }
            )
    return figures


def _side(factors: Factors) -> dict[str, Any]:
    format = factors.format
    return {"method": format.method, "bits": format.statistic.bits, **factors.figures()}
