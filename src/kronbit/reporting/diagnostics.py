"""The dict that ``diagnostics()`` returns: counters of every fallback, and figures per group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kronbit.blocks.groups import Group
from kronbit.distributed.ranks import Ranks
from kronbit.factors import Factors
from kronbit.kernels.guard import why_not
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.state_plan import StatePlan


def diagnostics(
    plan: StatePlan | None,
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


def fallback_counts(plan: StatePlan | None) -> dict[str, int]:
    """How often something was refused or repaired, over all groups. Waits for the device."""
    counts = dict.fromkeys((*Factors.COUNTERS, "ungrafted"), 0)
    for preconditioner in plan.preconditioners.values() if plan else ():
        counts["ungrafted"] += int(preconditioner.stacks.ungrafted)
        for group in preconditioner.stacks.groups:
            for name, count in _counts(group).items():
                counts[name] += count
    return counts


def acceleration_figures(
    plan: StatePlan | None, guards: Mapping[torch.device, NonfiniteGuard]
) -> dict[str, Any]:
    """What runs by kernels and graphs, and why not; how many parameters take products how."""
    preconditioners = plan.preconditioners if plan else {}
    products: Counter[int] = Counter()
    for preconditioner in preconditioners.values():
        products.update(preconditioner.products.ways[i] for i in preconditioner.stacks.refreshed)
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


def group_figures(plan: StatePlan | None) -> list[dict[str, Any]]:
    """Figures of every group of blocks. Waits for the device."""
    figures = []
    for device, preconditioner in plan.preconditioners.items() if plan else ():
        for group in preconditioner.stacks.groups:
            ratio = preconditioner.stacks.graft_ratio[group.owner]
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
