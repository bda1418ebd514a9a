"""What a step has to do: sorted by device once, measured at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.groups import Due
from kronbit.nonfinite import Measured, NonfiniteGuard
from kronbit.plan import Plan
from kronbit.preconditioner import Preconditioner


@dataclass(frozen=True)
class Itinerary:
    """The parameters of a step; it holds for the next one, too, as long as nothing changes.

    Attributes:
        params: Those that have a gradient.
        configs: Their options.
        shapes: Their shapes.
        devices: Their devices.
        entries: Their states.
        plan: Where the preconditioned ones have their place.
        errands: Device -> which parameters it has.
    """

    params: Sequence[Tensor]
    configs: Sequence[Config]
    shapes: list[torch.Size]
    devices: list[torch.device]
    entries: Sequence[dict[str, Any]]
    plan: Plan
    errands: Mapping[torch.device, Errand]

    @classmethod
    def make(
        cls,
        params: Sequence[Tensor],
        configs: Sequence[Config],
        plan: Plan,
        state: Mapping[Tensor, dict[str, Any]],
    ) -> Itinerary:
        """Sort parameters by device and by whether they are preconditioned."""
        errands: dict[torch.device, Errand] = {}
        for number, p in enumerate(params):
            if p.device not in errands:
                count = len(plan.preconditioners[p.device].members)
                errands[p.device] = Errand(plan.preconditioners[p.device], [None] * count, [])
            place = plan.places.get(p)
            if place is None:
                errands[p.device].rest.append(number)
            else:
                errands[p.device].members[place.index] = number
        return cls(
            params,
            configs,
            shapes=[p.shape for p in params],
            devices=[p.device for p in params],
            entries=[state[p] for p in params],
            plan=plan,
            errands=errands,
        )

    def holds(self, params: Sequence[Tensor], configs: Sequence[Config]) -> bool:
        """Whether parameters and options are still the same."""
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all(map(is_, configs, self.configs))
            and list(map(attrgetter("shape"), params)) == self.shapes
            and list(map(attrgetter("device"), params)) == self.devices
        )


@dataclass(frozen=True)
class Errand:
    """The parameters of a step on one device, by their number in the itinerary.

    Attributes:
        preconditioner: The state of the device's matrices, its members.
        members: Of each member; ``None`` if it has no gradient.
        rest: Those that are left to F.
    """

    preconditioner: Preconditioner
    members: list[int | None]
    rest: list[int]


@dataclass(frozen=True)
class Work:
    """What a step does on one device.

    Attributes:
        itinerary: The parameters of the step.
        errand: Those on this device.
        measured: Their gradients: the members', then those that are left to F.
    """

    itinerary: Itinerary
    errand: Errand
    measured: Measured

    @property
    def preconditioner(self) -> Preconditioner:
        """The state of the device's matrices."""
        return self.errand.preconditioner

    @property
    def grads(self) -> Sequence[Tensor | None]:
        """The gradient of every member."""
        return self.measured.grads[: len(self.errand.members)]

    @property
    def norms(self) -> Tensor:
        """‖G‖_F of every member."""
        return self.measured.norms[: len(self.errand.members)]

    @property
    def finite(self) -> Tensor:
        """bool, whether the gradient of every member is finite."""
        return self.measured.finite[: len(self.errand.members)]

    def due(self, scheduled: Callable[[Config, int, float], bool]) -> dict[int, Due]:
        """Members whose update or refresh falls on this step, with their options and blocks."""
        configs, entries = self.itinerary.configs, self.itinerary.entries
        turns = [(i, number) for i, number in enumerate(self.errand.members) if number is not None]
        # Most members have the same options and the same t; equal options are the same object.
        kinds = {(id(configs[n]), entries[n]["step"] + 1): configs[n] for _, n in turns}
        answers = {
            key: config.stagger or scheduled(config, key[1], 0.0) for key, config in kinds.items()
        }
        if not any(answers.values()):
            return {}
        due = {}
        for i, number in turns:
            config, t = configs[number], entries[number]["step"] + 1
            if config.stagger:
                phases = self.preconditioner.phases[i]
                now = frozenset(phase for phase in phases if scheduled(config, t, phase))
                if now:
                    due[i] = Due(config, None if len(now) == len(phases) else now)
            elif answers[id(config), t]:
                due[i] = Due(config)
        return due

    def nonfinite(self) -> list[Tensor]:
        """Parameters with a non-finite gradient. Waits for the device."""
        numbers = [*self.errand.members, *self.errand.rest]
        finite = zip(numbers, self.measured.finite.tolist(), strict=True)
        return [self.itinerary.params[i] for i, good in finite if i is not None and not good]

    def zero_untouched(self) -> None:
        """Zero non-finite gradients that ``precondition`` leaves alone."""
        self.measured.zero_nonfinite(but=self.preconditioner.refreshed)

    def note_products(self, due: Mapping[int, Due]) -> None:
        """Write down in the state how products are taken from now on; 0: not yet."""
        refreshed, ways = self.preconditioner.refreshed, self.preconditioner.products.ways
        for i in due:
            number = self.errand.members[i]
            if number is not None:
                self.itinerary.entries[number]["product_bits"] = ways[i] if i in refreshed else 0


def measure(itinerary: Itinerary, guards: dict[torch.device, NonfiniteGuard]) -> list[Work]:
    """Measure a step's gradients, device by device; missing guards are added."""
    works = []
    params = itinerary.params
    for device, errand in itinerary.errands.items():
        if device not in guards:
            guards[device] = NonfiniteGuard(device)
        grads = [None if number is None else params[number].grad for number in errand.members]
        grads += [params[number].grad for number in errand.rest]
        works.append(Work(itinerary, errand, guards[device].measure(grads)))
    return works
