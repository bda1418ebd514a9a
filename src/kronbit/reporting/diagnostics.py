"""The dict that ``diagnostics()`` returns: counters of all fallbacks, and figures per group."""

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
from kronbit.step.preconditioner import Preconditioner
from kronbit.step.state_plan import StatePlan


def diagnostics(
    plan: StatePlan | None,
    guards: Mapping[torch.device, NonfiniteGuard],
    ranks: Ranks | None,
    missed: Mapping[str, int],
    past: Mapping[str, int],
) -> dict[str, Any]:
    """Return the dict of ``SecondOrder.diagnostics``. Waits for the device.

    ``missed`` holds the counters of the statistics, ``past`` the counters of earlier plans.
    """
    preconditioners = {} if plan is None else plan.preconditioners
    skipped = sum(int(guard.skipped) for guard in guards.values())
    counts = Counter({"skipped_gradients": skipped, **fallback_counts(plan), **missed})
    counts.update(past)
    products: Counter[int] = Counter()
    refused: dict[str, str] = {}
    for device, preconditioner in preconditioners.items():
        precisions = preconditioner.products.bits
        products.update(precisions[i] for i in preconditioner.stacks.refreshed)
        reason = preconditioner.graph_refused()
        if device in guards:
            reason = reason or guards[device].graph_refused()
        refused[str(device)] = reason or "not refused"
    return {
        **counts,
        "kernels": {str(device): why_not(device) or "used" for device in preconditioners},
        "cuda_graph": refused,
        "products": dict(products),
        "ranks": {} if ranks is None else ranks.figures(),
        "groups": [
            _figures(device, preconditioner, group)
            for device, preconditioner in preconditioners.items()
            for group in preconditioner.stacks.groups
        ],
    }


def fallback_counts(plan: StatePlan | None) -> Counter[str]:
    """Return how often each fallback was used, over all groups. Waits for the device."""
    counts = Counter(dict.fromkeys((*Factors.COUNTERS, "ungrafted"), 0))
    for preconditioner in () if plan is None else plan.preconditioners.values():
        counts["ungrafted"] += int(preconditioner.stacks.ungrafted)
        for group in preconditioner.stacks.groups:
            counts.update(_counts(group))
    return counts


def _counts(group: Group) -> dict[str, int]:
    sides = (group.left, group.right)
    return {name: sum(int(side.counters[name]) for side in sides) for name in Factors.COUNTERS}


def _figures(device: torch.device, preconditioner: Preconditioner, group: Group) -> dict[str, Any]:
    ratio = preconditioner.stacks.graft_ratio[group.member_of]
    return {
        "device": str(device),
        "shape": group.shape,
        "blocks": len(group.member_of),
        "left": _side_figures(group.left),
        "right": _side_figures(group.right),
        "graft_ratio": (float(ratio.min()), float(ratio.max())),
        **_counts(group),
    }


def _side_figures(factors: Factors) -> dict[str, Any]:
    format = factors.format
    return {"method": format.method, "bits": format.statistic.bits, **factors.figures()}
