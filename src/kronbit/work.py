"""The gradients of one device at one step, in the preconditioner's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.nonfinite import NonfiniteGuard, zero_where_nonfinite
from kronbit.plan import Plan
from kronbit.preconditioner import Preconditioner


@dataclass(frozen=True)
class Turn:
    """A parameter that has a gradient at this step.

    Attributes:
        p: The parameter.
        config: Its options.
        t: The number of this step, counted from 1 for each parameter.
    """

    p: Tensor
    config: Config
    t: int


@dataclass(frozen=True)
class Work:
    """What a step does on one device.

    Attributes:
        preconditioner: The state of the device's matrices, its members.
        turns: Member -> its turn, for members that have a gradient.
        grads: The gradient of every member, ``None`` where there is none.
        norms: ‖G‖_F of every member.
        finite: bool, whether the gradient of every member is finite.
        rest: Parameters that are left to F.
        rest_finite: bool, whether their gradients are finite.
    """

    preconditioner: Preconditioner
    turns: Mapping[int, Turn]
    grads: list[Tensor | None]
    norms: Tensor
    finite: Tensor
    rest: list[Tensor]
    rest_finite: Tensor

    def due(self, scheduled: Callable[[Config, int], bool]) -> dict[int, Config]:
        """Members whose update or refresh falls on this step, with their options."""
        return {i: turn.config for i, turn in self.turns.items() if scheduled(turn.config, turn.t)}

    def nonfinite(self) -> list[Tensor]:
        """Parameters with a non-finite gradient. Waits for the device."""
        members = [self.turns[i].p for i, good in enumerate(self.finite.tolist()) if not good]
        others = zip(self.rest, self.rest_finite.tolist(), strict=True)
        return members + [p for p, good in others if not good]

    def zero_untouched(self) -> None:
        """Zero non-finite gradients that ``precondition`` leaves alone."""
        waiting = [i for i in self.turns if i not in self.preconditioner.refreshed]
        grads = [self.turns[i].p.grad for i in waiting] + [p.grad for p in self.rest]
        finite = torch.cat([*(self.finite[i : i + 1] for i in waiting), self.rest_finite])
        zero_where_nonfinite([grad for grad in grads if grad is not None], finite)


def measure(
    turns: Sequence[Turn], plan: Plan, guards: dict[torch.device, NonfiniteGuard]
) -> list[Work]:
    """Sort a step's gradients by device and measure them.

    Args:
        turns: Parameters that have a gradient.
        plan: Where each matrix has its state.
        guards: The devices' guards; missing ones are added.
    """
    by_device: dict[torch.device, list[Turn]] = {}
    for turn in turns:
        by_device.setdefault(turn.p.device, []).append(turn)
    works = []
    for device, there in by_device.items():
        if device not in guards:
            guards[device] = NonfiniteGuard(device)
        preconditioner = plan.preconditioners[device]
        members = {plan.places[turn.p].index: turn for turn in there if turn.p in plan.places}
        rest = [turn.p for turn in there if turn.p not in plan.places]
        count = len(preconditioner.members)
        grads = [members[i].p.grad if i in members else None for i in range(count)]
        norms = guards[device].norms([*grads, *(p.grad for p in rest)])
        finite = torch.isfinite(norms)
        works.append(
            Work(
                preconditioner,
                turns=members,
                grads=grads,
                norms=norms[:count],
                finite=finite[:count],
                rest=rest,
                rest_finite=finite[count:],
            )
        )
    return works
