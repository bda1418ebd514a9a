"""Binding of the optimizer's state to the plan's stacks and to F's state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.gradients import StepGradients
from kronbit.blocks.groups import Turn
from kronbit.state.validation import checked_leaves
from kronbit.step.state_plan import StatePlan
from kronbit.step.step_plan import Snapshot, StepPlan

# Keys in the state of a parameter that are not blocks.
_OTHER_KEYS = ("step", "base", "product_bits")


def blocks_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks in the state of a parameter."""
    return {key: value for key, value in entry.items() if key not in _OTHER_KEYS}


# Sentinel after the last dict: a missing or extra value shifts it and is detected.
_END = {"end": object()}

# The optimizer's state, and F's.
State: TypeAlias = MutableMapping[Tensor, dict[str, Any]]
BaseState: TypeAlias = MutableMapping[Tensor, Any]


class Binding:
    """Makes the state's tensors views into the plan's stacks and detects replaced tensors.

    Offloading, device moves and resets replace or remove tensors of the state. Identity comparisons
    detect this. Entries and blocks are compared before every step. The tensors inside of blocks are
    many: they are compared before a step that writes to them, and otherwise after the step.
    """

    def __init__(self) -> None:
        self._state: Mapping[Tensor, Any] | None = None
        self._entries: list[tuple[Tensor, dict[str, Any]]] = []
        # For every block: the entry that holds it, its key in the entry, and its dict.
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._views: list[dict[str, Any]] = []
        # Live views of all dicts inside of blocks, and the values that they must hold.
        self._dicts: list[Collection[Any]] = []
        self._values: list[Any] = []

    def holds(self, state: Mapping[Tensor, Any]) -> bool:
        """True if the state still holds all bound entries, blocks and tensors."""
        return (
            state is self._state
            and all(state.get(p) is entry for p, entry in self._entries)
            and self.holds_blocks()
            and self.holds_tensors()
        )

    def holds_blocks(self) -> bool:
        """True if the entries still hold all bound blocks."""
        return self._state is not None and all(
            map(is_, map(dict.get, self._holders, self._keys), self._views)
        )

    def holds_tensors(self) -> bool:
        """True if the blocks still hold all bound tensors."""
        return all(map(is_, chain.from_iterable(self._dicts), self._values))

    def bind(self, plan: StatePlan, state: State) -> set[Tensor]:
        """Put the plan's views into the state and keep the values that the state holds.

        Returns:
            Parameters that have blocks in the state but no ``product_bits``.

        Raises:
            ValueError: If a tensor of the state does not fit. Nothing is changed in this case.
        """
        blocks = list(plan.blocks())
        held = []
        for p, key, _, sides in blocks:
            values = state.get(p, {}).get(key)
            where = f"state of a parameter of shape {tuple(p.shape)}: {key}"
            if values is not None:
                values = {
                    side: checked_leaves(values.get(side), factors.layout, f"{where}[{side!r}]")
                    for side, factors in sides.items()
                }
            held.append(values)
        self._state = None  # not intact until everything is bound
        self._entries = [(p, state[p]) for p in plan.locations]
        self._holders, self._keys, self._views, self._dicts = [], [], [], []
        for (p, key, row, sides), values in zip(blocks, held, strict=True):
            views = {side: factors.slot(row) for side, factors in sides.items()}
            for side, leaves in (values or {}).items():
                for name, value in leaves.items():
                    views[side][name].copy_(value)
            state[p][key] = views
            self._holders.append(state[p])
            self._keys.append(key)
            self._views.append(views)
            self._dicts += [views.values(), *(leaves.values() for leaves in views.values())]
        self._dicts.append(_END.values())
        self._values = [value for values in self._dicts for value in values]
        self._state = state
        restored = {p for (p, *_), values in zip(blocks, held, strict=True) if values}
        unknown = {p for p in restored if "product_bits" not in state[p]}
        for p in plan.locations:
            if p in unknown:
                continue
            bits = state[p].setdefault("product_bits", 0)
            if bits:
                preconditioner, index = plan.of(p)
                preconditioner.stacks.refreshed.add(index)
                preconditioner.products.bits[index] = bits
        return unknown


def _keep_on_host(
    old: Mapping[str, Any], new: MutableMapping[str, Any], device: torch.device
) -> None:
    """Move F's counters back to the CPU, where F reads them without waiting for the device.

    After a resume, Lightning moves the state to the parameter's device. It spares only a tensor
    ``state[p]["step"]``, not the counters in ``state[p]["base"]``.
    """
    tensors = {name: value for name, value in old.items() if isinstance(value, Tensor)}
    if any(value.dim() and value.device != device for value in tensors.values()):
        return  # the parameter has moved, and F may want its counters on the new device
    for name, value in tensors.items():
        if not value.dim() and value.device.type == "cpu" and isinstance(new.get(name), Tensor):
            new[name] = new[name].cpu()


class BaseLink:
    """Keeps ``state[p]["base"]`` and F's state of p the same dict if either is replaced."""

    def __init__(self) -> None:
        self._linked: dict[Tensor, Any] = {}
        # The entries, their "base" dicts, F's state, and empty dicts that the two do not share.
        self._remembered: Sequence[dict[str, Any]] | None = None
        self._shown: list[Any] = []
        self._base_state = Snapshot({})
        self._empty: list[Mapping[str, Any]] = []

    def start(self, p: Tensor, state: State, base_state: BaseState) -> None:
        """Create the state of a parameter if needed, and give F the dict ``state[p]["base"]``."""
        if "base" not in state[p] and p in self._linked:
            # The entry was reset, so F's state of p is reset, too.
            del self._linked[p]
            base_state.pop(p, None)
        state[p].setdefault("step", 0)
        held = state[p].setdefault("base", {})
        if held and held is not self._linked.get(p, held):
            # The dict was replaced, by offloading or a device move.
            _keep_on_host(self._linked[p], held, p.device)
            base_state[p] = held

    def holds(self, entries: Sequence[dict[str, Any]], base_state: BaseState) -> bool:
        """True if nothing has changed since ``remember`` recorded these entries."""
        return (
            entries is self._remembered
            and all(map(is_, map(dict.get, entries, repeat("base")), self._shown))
            and self._base_state.holds(base_state)
            and not any(self._empty)
        )

    def remember(
        self, params: Sequence[Tensor], entries: Sequence[dict[str, Any]], base_state: BaseState
    ) -> None:
        """Record the entries for ``holds`` if each contains F's dict, or both dicts are empty."""
        self._remembered, self._empty = None, []
        self._shown = list(map(dict.get, entries, repeat("base")))
        for p, shown in zip(params, self._shown, strict=True):
            held = base_state.get(p)
            if held is not shown:
                if held or shown or shown is None:
                    return
                self._empty += [shown] if held is None else [shown, held]
        self._remembered, self._base_state = entries, Snapshot(base_state)

    def join(self, state: State, base_state: BaseState) -> None:
        """Set ``state[p]["base"]`` to F's dict for every parameter that has state in F."""
        for p in [p for p, held in base_state.items() if held and isinstance(p, Tensor)]:
            self.start(p, state, base_state)
            if p in base_state:  # start() removes F's state of a reset parameter
                state[p]["base"] = self._linked[p] = base_state[p]


class StateKeeper:
    """Keeps the optimizer's state, the plan's stacks and F's state in agreement.

    Attributes:
        plan: The location of all state; None if it must be laid out anew.
        base_link: Links the state with F's state.
    """

    def __init__(self) -> None:
        self.plan: StatePlan | None = None
        self.base_link = BaseLink()
        self._binding = Binding()
        self._step_plan: StepPlan | None = None
        self._tensors_intact = True  # result of the last comparison

    def turns_of(self, p: Tensor) -> tuple[Turn, ...] | None:
        """Return the turns of a parameter under ``stagger``; None if they are not known."""
        return None if self.plan is None else self.plan.turns(p)

    def step_plan(
        self,
        gradients: StepGradients,
        state: State,
        base_state: BaseState,
        name: Callable[[Tensor], str],
        replan: Callable[[Collection[Tensor]], StatePlan],
    ) -> tuple[StepPlan, StepGradients]:
        """Return the last step's plan, or a new one if parameters or the state have changed.

        ``replan`` lays out all state anew; it is called with the parameters of the step.

        Returns:
            The plan, and the gradients in its order.
        """
        last = self._step_plan
        if last is not None and last.holds(gradients) and self._holds(last, state, base_state):
            last.schedule()
            # A step that writes to the state compares all tensors first; others compare at the end.
            if not last.writes or self._binding.holds_tensors():
                return last, gradients
        gradients = gradients.once()
        plan = self.plan
        if (
            plan is None
            or not self._binding.holds(state)
            or plan.lacks_any_of(gradients.params, gradients.configs, name)
        ):
            plan = replan(gradients.params)
        for p in gradients.params:
            self.base_link.start(p, state, base_state)
        self._step_plan = StepPlan(gradients, plan, state)
        self._step_plan.schedule()
        return self._step_plan, gradients

    def _holds(self, last: StepPlan, state: State, base_state: BaseState) -> bool:
        """True if the state has not changed since the last step with this plan."""
        return (
            last.state_plan is self.plan
            and self._tensors_intact
            and last.states.holds(state)
            and self._binding.holds_blocks()
            and self.base_link.holds(last.entries, base_state)
        )

    def bind(
        self,
        plan: StatePlan,
        params: Iterable[Tensor],
        state: State,
        base_state: BaseState,
        unknown: Iterable[Tensor] = (),
    ) -> None:
        """Make the state's tensors views into a plan's stacks; see ``Binding.bind``.

        Args:
            plan: The plan.
            params: Parameters whose state is created if they have none.
            state: The optimizer's state.
            base_state: F's state.
            unknown: More parameters whose ``product_bits`` must be derived from the roots.
        """
        self.plan = None  # until the new one is bound
        for p in params:
            self.base_link.start(p, state, base_state)
        lacking = self._binding.bind(plan, state)
        self._tensors_intact = True
        plan.derive_product_bits([*lacking, *unknown], state)
        self.plan = plan

    def after_step(self, plan: StepPlan, state: State, base_state: BaseState) -> None:
        """Compare the tensors of blocks and add F's new dicts to the state."""
        self._tensors_intact = self._binding.holds_tensors()
        if not self.base_link.holds(plan.entries, base_state):
            self.base_link.join(state, base_state)
            self.base_link.remember(plan.params, plan.entries, base_state)
