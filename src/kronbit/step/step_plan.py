"""The plan of a step: parameters are sorted by device once, then scheduled at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from kronbit.blocks.gradients import StepGradients
from kronbit.blocks.groups import Due
from kronbit.config import Config
from kronbit.gpu.measured import Measured
from kronbit.statistics import Statistics
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner
from kronbit.step.schedule import Event, due_blocks, refreshes_at, turns_at, updates_at
from kronbit.step.state_plan import StatePlan

_STEP = itemgetter("step")


class Snapshot:
    """A record of the keys and values of a dict.

    Entries are compared by identity and in order: the hash of a tensor, which torch computes in
    Python, is too slow for every parameter at every step.
    """

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._keys, self._values = list(mapping), list(mapping.values())

    def holds(self, mapping: Mapping[Any, Any]) -> bool:
        """True if no entry was added, removed or replaced."""
        return (
            len(mapping) == len(self._keys)
            and all(map(is_, mapping, self._keys))
            and all(map(is_, mapping.values(), self._values))
        )


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks these elements of a sequence, without a loop in Python."""
    if len(numbers) < 2:  # itemgetter would return the element itself
        return lambda items: tuple(items[number] for number in numbers)
    return itemgetter(*numbers)


class DevicePlan:
    """The part of a step that runs on one device. Parameters are numbered as in the step plan.

    Args:
        preconditioner: The preconditioner of the device's members.
        numbers: The number of each member; None if it has no gradient.
        rest: The numbers of the device's parameters that are left to F.
        gradients: All parameters of the step.
        entries: The state of each parameter.

    Attributes:
        sizes: Numbers of elements of the gradients that ``pick`` returns.
        taps: Taps of these gradients; 0 for parameters that are left to F. Empty if no member has
            four axes or more, so that none can be channels-last.
        updates: Members whose statistics are updated at this step, with their blocks.
        refreshes: Members whose roots are refreshed at this step, with their blocks.
        measured: The gradients of this step: of the members, then of the parameters left to F.
    """

    measured: Measured

    def __init__(
        self,
        preconditioner: Preconditioner,
        numbers: list[int | None],
        rest: list[int],
        gradients: StepGradients,
        entries: Sequence[dict[str, Any]],
    ) -> None:
        self.preconditioner, self.stacks = preconditioner, preconditioner.stacks
        self._numbers, self._rest = numbers, rest
        self._params, self._configs, self._entries = gradients.params, gradients.configs, entries
        self._pick = _picker([-1 if number is None else number for number in (*numbers, *rest)])
        present = [number for number in numbers if number is not None]
        self._pick_members, self._pick_rest = _picker(present), _picker(rest)
        self._shapes = [gradients.grads[number].shape for number in present]
        self._rest_sizes = [gradients.grads[number].numel() for number in rest]
        members = self.stacks.members
        self.sizes = [*(math.prod(m.blocking.matrices) for m in members), *self._rest_sizes]
        taps = [member.blocking.taps for member in members] + [0] * len(rest)
        self.taps = taps if any(len(shape) > 3 for shape in self._shapes) else []
        self._member_configs = list({gradients.configs[number] for number in present})
        self._member_entries = [entries[number] for number in present]
        self.updates: dict[int, Due] = {}
        self.refreshes: dict[int, Due] = {}

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """True if gradients of members keep their shapes, and other gradients their sizes."""
        shapes = list(map(attrgetter("shape"), self._pick_members(grads)))
        return (
            shapes == self._shapes
            and list(map(Tensor.numel, self._pick_rest(grads))) == self._rest_sizes
        )

    def schedule(self) -> None:
        """Look up which members are due at this step."""
        self.updates, self.refreshes = self._due(updates_at), self._due(refreshes_at)

    def _due(self, event: Event) -> dict[int, Due]:
        """Return the members that are due for an event. Usually none is, and this returns early."""
        all_turns = self.preconditioner.all_turns
        due_turns = {
            (config, step): turns_at(event, config, step + 1, all_turns)
            for step in set(map(_STEP, self._member_entries))
            for config in self._member_configs
        }
        if not any(due_turns.values()):
            return {}
        due = {}
        for i, number in enumerate(self._numbers):
            if number is not None:
                config = self._configs[number]
                turns = due_turns[config, self._entries[number]["step"]]
                blocks = due_blocks(config, turns, self.preconditioner.turns[i])
                if blocks is not None:
                    due[i] = blocks
        return due

    def pick(self, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Return each member's gradient, or None, then the gradients that are left to F."""
        return self._pick([*grads, None])

    def param(self, member: int) -> Tensor:
        """Return the parameter of a member that has a gradient."""
        number = self._numbers[member]
        assert number is not None
        return self._params[number]

    def nonfinite(self) -> list[tuple[Tensor, int]]:
        """Return parameters with a non-finite gradient, and their steps. Waits for the device."""
        numbers = [*self._numbers, *self._rest]
        return [
            (self._params[number], self._entries[number]["step"] + 1)
            for number, finite in zip(numbers, self.measured.finite.tolist(), strict=True)
            if number is not None and not finite
        ]

    def update(self, statistics: Statistics) -> None:
        """Run L ← PU(L, G Gᵀ), R ← PU(R, Gᵀ G), or with another M, for members that are due."""
        source = statistics.source(self.stacks, self.measured, self.updates, self.param)
        self.preconditioner.update(self.measured, *source)

    def refresh(self) -> None:
        """Run L̂ ← PIRU(L), R̂ ← PIRU(R) for the members that are due.

        ``product_bits`` in the state is the precision of their later products; 0 while undecided.
        """
        self.preconditioner.refresh(self.measured, self.refreshes)
        refreshed, bits = self.stacks.refreshed, self.preconditioner.products.bits
        for i in self.refreshes:
            number = self._numbers[i]
            if number is not None:
                self._entries[number]["product_bits"] = bits[i] if i in refreshed else 0

    def precondition(self) -> None:
        """Compute Ĝ = L̂ G R̂, and write G̃ = Ĝ ‖G‖ / ‖Ĝ‖ over G. While L̂ = R̂ = I, G̃ is G."""
        self.preconditioner.precondition(self.measured)


class StepPlan:
    """The plan of a step, which stays valid for later steps as long as nothing changes.

    Parameters are sorted by device and by whether they are preconditioned.

    Args:
        gradients: The gradients of the step.
        state_plan: The location of the state of preconditioned parameters.
        state: The optimizer's state.

    Attributes:
        params: Parameters that have a gradient.
        entries: The state of each parameter.
        devices: The parts of the plan, one per device.
        states: Keys and values of the optimizer's state when the plan was made.
    """

    def __init__(
        self, gradients: StepGradients, state_plan: StatePlan, state: Mapping[Tensor, Any]
    ) -> None:
        self.params, self._configs = gradients.params, gradients.configs
        self.state_plan = state_plan
        # Devices are compared by number: torch makes a new object for each query.
        self._device_numbers = list(map(Tensor.get_device, gradients.grads))
        self.entries, self.states = [state[p] for p in self.params], Snapshot(state)
        preconditioners = state_plan.preconditioners
        numbers: dict[torch.device, list[int | None]] = {}
        rest: dict[torch.device, list[int]] = {}
        for number, p in enumerate(self.params):
            if p.device not in numbers:
                members = preconditioners[p.device].stacks.members
                numbers[p.device], rest[p.device] = [None] * len(members), []
            if p in state_plan.locations:
                numbers[p.device][state_plan.of(p)[1]] = number
            else:
                rest[p.device].append(number)
        self.devices = [
            DevicePlan(preconditioners[device], of_device, rest[device], gradients, self.entries)
            for device, of_device in numbers.items()
        ]

    def holds(self, gradients: StepGradients) -> bool:
        """True if parameters, options, and the devices and shapes of gradients are unchanged."""
        return (
            len(gradients.params) == len(self.params)
            and all(map(is_, gradients.params, self.params))
            and gradients.configs == self._configs
            and list(map(Tensor.get_device, gradients.grads)) == self._device_numbers
            and all(device.holds(gradients.grads) for device in self.devices)
        )

    def schedule(self) -> None:
        """Look up what is due at this step."""
        for device in self.devices:
            device.schedule()

    @property
    def writes(self) -> bool:
        """True if this step updates or refreshes anything."""
        return any(device.updates or device.refreshes for device in self.devices)

    @contextmanager
    def measured(
        self,
        grads: list[Tensor],
        dtypes: set[torch.dtype] | None,
        guards: dict[torch.device, NonfiniteGuard],
        config: Config,
    ) -> Iterator[None]:
        """Measure the gradients of each device; drop them at the end, so that they can be freed.

        Args:
            grads: The gradients of the parameters.
            dtypes: Result of ``plain_dtypes``.
            guards: Guards by device; missing ones are added.
            config: The options of new guards.
        """
        try:
            for part in self.devices:
                device = part.stacks.device
                if device not in guards:
                    guards[device] = NonfiniteGuard(device, config)
                picked = part.pick(grads), part.sizes, part.taps
                part.measured = guards[device].measure(*picked, dtypes)
            yield
        finally:
            for part in self.devices:
                vars(part).pop("measured", None)

    def set_steps(self, steps: Iterable[int]) -> None:
        """Set t of every parameter."""
        for entry, step in zip(self.entries, steps, strict=True):
            entry["step"] = step

    def settle(self) -> None:
        """Forget the progress of the step, which is complete."""
        for device in self.devices:
            device.preconditioner.progress.settle()


def refuse_nonfinite(
    devices: Iterable[DevicePlan], any_rank: Callable[[bool], bool], name: Callable[[Tensor], str]
) -> None:
    """Raise an error if a gradient is not finite, here or on a rank that waits for this one."""
    nonfinite = [pair for device in devices for pair in device.nonfinite()]
    if not any_rank(bool(nonfinite)):
        return
    where = "on another rank"
    if nonfinite:
        p, step = nonfinite[0]
        where = f"such as that of {name(p)} at its step {step}"
    raise FloatingPointError(
        f"{len(nonfinite) or 'some'} gradient(s) are not finite, {where}; nothing was changed. "
        "Set nonfinite='zero' to replace such gradients by zeros"
    )
