"""What a step has to do: sorted by device once, measured at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.gradients import Present
from kronbit.blocks.groups import DeviceStacks, Due
from kronbit.config import FIRST_TURN, Config, Turn
from kronbit.gpu.norms import Measured
from kronbit.interruptions import ended_by
from kronbit.step.failures import Stage
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.plan import Plan
from kronbit.step.preconditioner import Preconditioner

_STEP = itemgetter("step")
_TOGETHER = (FIRST_TURN,)
# Whether something is scheduled: by options, step and turn.
Scheduled: TypeAlias = Callable[[Config, int, Turn], bool]


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes some elements out of a sequence, without a loop in Python."""
    if len(numbers) < 2:  # itemgetter would return the element itself
        return lambda items: tuple(items[number] for number in numbers)
    return itemgetter(*numbers)


@dataclass(frozen=True)
class Itinerary:
    """The parameters of a step; it holds for the next one, too, as long as nothing changes.

    Attributes:
        params: Those that have a gradient.
        configs: Their options.
        devices: The devices' numbers; -1 is the CPU.
        entries: Their states.
        plan: Where the preconditioned ones have their place.
        errands: Device -> which parameters it has.
        states: All that was in the state.
    """

    params: list[Tensor]
    configs: list[Config]
    devices: list[int]
    entries: list[dict[str, Any]]
    plan: Plan
    errands: Mapping[torch.device, Errand]
    states: Snapshot

    @classmethod
    def make(
        cls, present: Present, plan: Plan, state: Mapping[Tensor, dict[str, Any]]
    ) -> Itinerary:
        """Sort parameters by device and by whether they are preconditioned."""
        members: dict[torch.device, list[int | None]] = {}
        rest: dict[torch.device, list[int]] = {}
        for number, p in enumerate(present.params):
            if p.device not in members:
                members[p.device] = [None] * len(plan.preconditioners[p.device].stacks.members)
                rest[p.device] = []
            place = plan.places.get(p)
            if place is None:
                rest[p.device].append(number)
            else:
                members[p.device][place.index] = number
        entries = [state[p] for p in present.params]
        return cls(
            present.params,
            present.configs,
            devices=[grad.get_device() for grad in present.grads],
            entries=entries,
            plan=plan,
            errands={
                device: Errand(plan.preconditioners[device], own, rest[device], present, entries)
                for device, own in members.items()
            },
            states=Snapshot(state),
        )

    def find_turns(self) -> bool:
        """Find whose turn it is at a step to be updated or refreshed, and whether there is one."""
        found = [errand.find_turns() for errand in self.errands.values()]
        return any(found)

    def take(self, step: Callable[[], object], stage: Stage) -> None:
        """Take F's step. Inside, it counts, as hooks of F expect; afterwards, if F is through."""
        steps = list(map(_STEP, self.entries))

        def count_and_step() -> None:
            for entry in self.entries:
                entry["step"] += 1
            step()
            stage.counts()

        def finish() -> None:
            if stage.through:
                self._settle()
                return
            for entry, before in zip(self.entries, steps, strict=True):
                entry["step"] = before

        ended_by(finish, count_and_step)

    def _settle(self) -> None:
        for errand in self.errands.values():
            errand.preconditioner.progress.settle()

    def holds(self, present: Present) -> bool:
        """Whether parameters, their options and what matters of their gradients are the same."""
        return (
            len(present.params) == len(self.params)
            and all(map(is_, present.params, self.params))
            and present.configs == self.configs
            # By number: torch makes a new object of every device that it is asked for.
            and list(map(Tensor.get_device, present.grads)) == self.devices
            and all(errand.holds(present.grads) for errand in self.errands.values())
        )


class Errand:
    """The parameters of a step on one device, by their number in the itinerary.

    What every step asks for is looked up once.

    Args:
        preconditioner: The state of the device's matrices, its members.
        members: Of each member; ``None`` if it has no gradient.
        rest: Those that are left to F.
        present: All parameters of the step.
        entries: Their states.

    Attributes:
        sizes: Elements of the gradients that ``pick`` returns, were they all there.
        taps: Of convolutions among them; 0 for those that are left to F, which nobody cuts. Nothing
            if there are no members of four axes or more, which may be in channels-last order.
        configs_there: The options that occur among members with a gradient.
        entries_there: The states of these members.
        turns: By what is scheduled, options and steps that members have seen: the turns that have
            come, as ``find_turns`` has found.
    """

    def __init__(
        self,
        preconditioner: Preconditioner,
        members: list[int | None],
        rest: list[int],
        present: Present,
        entries: Sequence[dict[str, Any]],
    ) -> None:
        self.preconditioner, self.members, self.rest = preconditioner, members, rest
        numbers = [-1 if number is None else number for number in (*members, *rest)]
        self._pick = _picker(numbers)
        there = [number for number in members if number is not None]
        self._pick_there, self._pick_rest = _picker(there), _picker(rest)
        self._shapes = [present.grads[number].shape for number in there]
        self._rest_sizes = [present.grads[number].numel() for number in rest]
        sizes = [math.prod(member.blocking.matrices) for member in preconditioner.stacks.members]
        self.sizes = [*sizes, *self._rest_sizes]
        taps = [member.blocking.taps for member in preconditioner.stacks.members] + [0] * len(rest)
        self.taps = taps if any(len(shape) > 3 for shape in self._shapes) else []
        self.configs_there = list({present.configs[number] for number in there})
        self.entries_there = [entries[number] for number in there]
        self.turns: dict[Scheduled, dict[tuple[Config, int], set[Turn]]] = {}
        self.find_turns()

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """Whether gradients have the shapes that state was made for; of others, the sizes."""
        shapes = list(map(attrgetter("shape"), self._pick_there(grads)))
        return (
            shapes == self._shapes
            and list(map(Tensor.numel, self._pick_rest(grads))) == self._rest_sizes
        )

    def find_turns(self) -> bool:
        """Find the turns that have come, and whether there is one.

        Nearly always there is one number of steps, and it is nobody's turn.
        """
        steps = set(map(_STEP, self.entries_there))
        found = False
        for scheduled in (Config.updates_at, Config.refreshes_at):
            self.turns[scheduled] = own = {
                (config, step): {
                    turn
                    for turn in (self.preconditioner.all_turns if config.stagger else _TOGETHER)
                    if scheduled(config, step + 1, turn)
                }
                for config in self.configs_there
                for step in steps
            }
            found = found or any(own.values())
        return found

    def pick(self, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradient of every member, ``None`` where there is none, and those left to F."""
        return self._pick([*grads, None])


class Work(NamedTuple):
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
    def stacks(self) -> DeviceStacks:
        """The members, their blocks and their state."""
        return self.preconditioner.stacks

    def param(self, member: int) -> Tensor:
        """The parameter of a member that has a gradient."""
        number = self.errand.members[member]
        assert number is not None
        return self.itinerary.params[number]

    def due(self, scheduled: Scheduled) -> dict[int, Due]:
        """Members whose update or refresh falls on this step, with their options and blocks."""
        now = self.errand.turns[scheduled]
        due: dict[int, Due] = {}
        if not any(now.values()):
            return due
        for i, number in enumerate(self.errand.members):
            if number is None:
                continue
            config = self.itinerary.configs[number]
            turns = now[config, self.itinerary.entries[number]["step"]]
            own = self.preconditioner.turns[i] if config.stagger else _TOGETHER
            mine = turns.intersection(own)
            if mine:
                due[i] = Due(config, None if len(mine) == len(own) else frozenset(mine))
        return due

    def nonfinite(self) -> list[Tensor]:
        """Parameters with a non-finite gradient. Waits for the device."""
        numbers = [*self.errand.members, *self.errand.rest]
        finite = zip(numbers, self.measured.finite.tolist(), strict=True)
        return [self.itinerary.params[i] for i, good in finite if i is not None and not good]

    def note_products(self, due: Mapping[int, Due]) -> None:
        """Write down in the state how products are taken from now on; 0: not yet."""
        refreshed, ways = self.preconditioner.stacks.refreshed, self.preconditioner.products.ways
        for i in due:
            number = self.errand.members[i]
            if number is not None:
                self.itinerary.entries[number]["product_bits"] = ways[i] if i in refreshed else 0


def measure(
    itinerary: Itinerary,
    grads: list[Tensor],
    dtypes: set[torch.dtype] | None,
    guards: dict[torch.device, NonfiniteGuard],
    config: Config,
) -> list[Work]:
    """Measure a step's gradients, device by device.

    Args:
        itinerary: The step's parameters.
        grads: Their gradients.
        dtypes: What ``plain_dtypes`` says of the gradients.
        guards: By device; missing ones are added.
        config: Says what becomes of gradients that are not finite.
    """
    works = []
    for device, errand in itinerary.errands.items():
        if device not in guards:
            guards[device] = NonfiniteGuard(device, config)
        measured = guards[device].measure(errand.pick(grads), errand.sizes, errand.taps, dtypes)
        works.append(Work(itinerary, errand, measured))
    return works


def refuse_nonfinite(
    works: Iterable[Work], anyone: Callable[[bool], bool], name: Callable[[Tensor], str]
) -> None:
    """Raise if a gradient is not finite, here or on a rank that waits for this one.

    Args:
        works: The step's.
        anyone: Whether something is so on any of these ranks.
        name: What a parameter is called.
    """
    bad = [(p, work) for work in works for p in work.nonfinite()]
    if not anyone(bool(bad)):
        return
    where = "on another rank"
    if bad:
        p, work = bad[0]
        own = zip(work.itinerary.params, work.itinerary.entries, strict=True)
        entry = next(entry for other, entry in own if other is p)
        where = f"that of {name(p)} first, at its step {entry['step'] + 1}"
    raise FloatingPointError(
        f"{len(bad) or 'some'} gradient(s) are not finite, {where}; nothing was changed. With "
        "nonfinite='zero' the step would go on without them"
    )


def updated_next(
    groups: Iterable[Mapping[str, Any]],
    config_of: Callable[[Mapping[str, Any]], Config],
    state: Mapping[Tensor, Mapping[str, Any]],
    plan: Plan | None,
) -> Iterator[tuple[Tensor, Config]]:
    """The parameters whose statistics the next step updates, if they have any; with options.

    Args:
        groups: Param groups.
        config_of: Their options.
        state: The optimizer's, as it is before that step.
        plan: Knows the turns of those that are staggered; those that it does not know may have any.
    """
    for group in groups:
        config = config_of(group)
        found: dict[tuple[int, int], bool] = {}  # nearly always one step, and nobody's turn
        for p in group["params"]:
            step = state[p].get("step", 0) if p in state else 0
            place = plan.places.get(p) if plan is not None and config.stagger else None
            if config.stagger and (plan is None or place is None):
                yield p, config
                continue
            turns: Sequence[Turn] = _TOGETHER
            if plan is not None and place is not None:
                turns = plan.preconditioners[place.device].turns[place.index]
            key = step, id(turns)
            if key not in found:
                found[key] = any(config.updates_at(step + 1, turn) for turn in turns)
            if found[key]:
                yield p, config


class Snapshot:
    """The keys and values of a dict as they are now.

    Compared by identity and in order: to look up a tensor takes its hash, which torch computes in
    Python, and that is too slow to be done at every step for every parameter.
    """

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._keys, self._values = list(mapping), list(mapping.values())

    def holds(self, mapping: Mapping[Any, Any]) -> bool:
        """Whether no entry has come, gone or been replaced."""
        return (
            len(mapping) == len(self._keys)
            and all(map(is_, mapping, self._keys))
            and all(map(is_, mapping.values(), self._values))
        )
