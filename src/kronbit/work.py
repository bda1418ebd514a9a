"""The gradients of one device at one step, in the preconditioner's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.nonfinite import NonfiniteGuard
from kronbit.plan import Plan
from kronbit.preconditioner import Preconditioner


@dataclass(frozen=True)
class Work:
    """What a step does on one device.

    Attributes:
        preconditioner: The state of the device's matrices, its members.
        params: Member -> parameter, for members that have a gradient.
        configs: Member -> options, for the same.
        times: Member -> t, the number of this step, for the same.
        grads: The gradient of every member, ``None`` where there is none.
        norms: ‖G‖_F of every member.
        finite: bool, whether the gradient of every member is finite.
        rest: Parameters that are left to F.
        rest_finite: bool, whether their gradients are finite.
    """

    preconditioner: Preconditioner
    params: Mapping[int, Tensor]
    configs: Mapping[int, Config]
    times: Mapping[int, int]
    grads: list[Tensor | None]
    norms: Tensor
    finite: Tensor
    rest: list[Tensor]
    rest_finite: Tensor

    def due(self, scheduled: Callable[[Config, int], bool]) -> dict[int, Config]:
        """Members whose turn it is at this step, with their options."""
        return {i: c for i, c in self.configs.items() if scheduled(c, self.times[i])}

    def nonfinite(self) -> list[Tensor]:
        """Parameters with a non-finite gradient. Waits for the device."""
        finite = [*self.finite.tolist(), *self.rest_finite.tolist()]
        owners = [*(self.params.get(i) for i in range(len(self.grads))), *self.rest]
        return [p for p, good in zip(owners, finite, strict=True) if p is not None and not good]


def sort_by_device(
    present: Mapping[Tensor, Config],
    times: Mapping[Tensor, int],
    plan: Plan,
    guards: dict[torch.device, NonfiniteGuard],
) -> list[Work]:
    """Measure all gradients and lay them out for the preconditioners.

    Args:
        present: Parameters that have a gradient, with their options.
        times: t of each.
        plan: Where each matrix has its state.
        guards: The devices' guards; missing ones are added.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for p in present:
        by_device.setdefault(p.device, []).append(p)
    works = []
    for device, params in by_device.items():
        if device not in guards:
            guards[device] = NonfiniteGuard(device)
        preconditioner = plan.preconditioners[device]
        places = {p: plan.places[p].index for p in params if p in plan.places}
        members = {index: p for p, index in places.items()}
        rest = [p for p in params if p not in places]
        grads = [
            members[index].grad if index in members else None
            for index in range(len(preconditioner.members))
        ]
        norms, finite = guards[device].measure(grads)
        works.append(
            Work(
                preconditioner=preconditioner,
                params=members,
                configs={index: present[p] for index, p in members.items()},
                times={index: times[p] for index, p in members.items()},
                grads=grads,
                norms=norms,
                finite=finite,
                rest=rest,
                rest_finite=guards[device].measure([p.grad for p in rest])[1],
            )
        )
    return works
