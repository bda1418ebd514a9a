"""The optimizer's state: the plan's tensors, and F's own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence, ValuesView
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from kronbit.state.validation import checked_leaves
from kronbit.step.state_plan import StatePlan
from kronbit.step.step_plan import Snapshot, StepPlan

# Names that are not blocks in the state of a parameter.
OWN_KEYS = ("step", "base", "product_bits")


def blocks_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks in the state of a parameter."""
    return {key: value for key, value in entry.items() if key not in OWN_KEYS}


# Behind the last of many dicts: by this, too few and too many values are noticed without counting.
_END = {"end": object()}


class Binding:
    """Keeps the state's tensors and the plan's stacks one.

    State leaves are views into the stacks. Others may replace or remove them (offloading, device
    moves, a reset), which is noticed by identity. There are thousands of tensors inside of blocks:
    these are compared before a step writes to them, else after it.
    """

    def __init__(self) -> None:
        self._state: Mapping[Tensor, Any] | None = None
        self._entries: list[tuple[Tensor, dict[str, Any]]] = []
        # Of every block: the entry that it is in, its key there, and its dict.
        self._owners: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._views: list[dict[str, Any]] = []
        # Live views of the dicts below the blocks, and the values that they shall show.
        self._dicts: list[ValuesView[Any]] = []
        self._values: list[Any] = []

    def holds_entries(self, state: Mapping[Tensor, Any]) -> bool:
        """True if every parameter still has the entry that its blocks were put into."""
        return state is self._state and all(state.get(p) is entry for p, entry in self._entries)

    def holds_blocks(self) -> bool:
        """True if every block in these entries is the one that was put there."""
        return self._state is not None and all(
            map(is_, map(dict.get, self._owners, self._keys), self._views)
        )

    def holds_tensors(self) -> bool:
        """True if the tensors inside of all blocks are those that were put there."""
        return all(map(is_, chain.from_iterable(self._dicts), self._values))

    def bind(self, plan: StatePlan, state: MutableMapping[Tensor, dict[str, Any]]) -> set[Tensor]:
        """Put the plan's views into the state; values that the state already holds are kept.

        Returns:
            Parameters that hold values, of which the state does not say how they are used.

        Raises:
            ValueError: If a held tensor does not fit; nothing is changed then.
        """
        blocks = list(plan.blocks())
        held = []
        for block in blocks:
            values = state.get(block.p, {}).get(block.key)
            where = f"state of a parameter of shape {tuple(block.p.shape)}: {block.key}"
            if values is not None:
                values = {
                    side: checked_leaves(values.get(side), factors.layout, f"{where}[{side!r}]")
                    for side, factors in block.sides.items()
                }
            held.append(values)
        self._state = None  # until all is there: what is not whole is not intact
        self._entries = [(p, state[p]) for p in plan.places]
        self._owners, self._keys, self._views, self._dicts = [], [], [], []
        for block, values in zip(blocks, held, strict=True):
            views = {side: factors.slot(block.row) for side, factors in block.sides.items()}
            for side, leaves in (values or {}).items():
                for name, value in leaves.items():
                    views[side][name].copy_(value)
            state[block.p][block.key] = views
            self._owners.append(state[block.p])
            self._keys.append(block.key)
            self._views.append(views)
            self._dicts += [views.values(), *(leaves.values() for leaves in views.values())]
        self._dicts.append(_END.values())
        self._values = [value for own in self._dicts for value in own]
        self._state = state
        unknown = {block.p for block, values in zip(blocks, held, strict=True) if values}
        unknown = {p for p in unknown if "product_bits" not in state[p]}
        for p, place in plan.places.items():
            own = plan.preconditioners[place.device]
            if p in unknown:
                continue
            bits = state[p].setdefault("product_bits", 0)
            if bits:
                own.stacks.refreshed.add(place.index)
                own.products.ways[place.index] = bits
        return unknown


def _keep_on_host(
    old: Mapping[str, Any], new: MutableMapping[str, Any], device: torch.device
) -> None:
    """Put counters back where F reads them without waiting for the device.

    After a resume Lightning moves all of the state to the parameter's device, but for a tensor
    that is called ``"step"`` in the first place, where ours is not one.
    """
    tensors = {name: value for name, value in old.items() if isinstance(value, Tensor)}
    if any(value.dim() and value.device != device for value in tensors.values()):
        return  # the parameter itself has moved: F may want its counters there
    for name, value in tensors.items():
        if not value.dim() and value.device.type == "cpu" and isinstance(new.get(name), Tensor):
            new[name] = new[name].cpu()


class BaseLink:
    """Keeps ``state[p]["base"]`` and F's own dict one, whichever of the two is replaced."""

    def __init__(self) -> None:
        self._linked: dict[Tensor, Any] = {}
        # Our entries, the dicts shown there, F's state, and dicts that are two, but empty.
        self._remembered: Sequence[dict[str, Any]] | None = None
        self._shown: list[Any] = []
        self._base_state = Snapshot({})
        self._empty: list[Mapping[str, Any]] = []

    def start(
        self,
        p: Tensor,
        state: MutableMapping[Tensor, dict[str, Any]],
        base_state: MutableMapping[Tensor, Any],
    ) -> None:
        """Make sure that a parameter has state, and that F has what stands there as its own."""
        if "base" not in state[p] and p in self._linked:
            # somebody reset our state: F's part of it goes, too
            del self._linked[p]
            base_state.pop(p, None)
        state[p].setdefault("step", 0)
        held = state[p].setdefault("base", {})
        if held and held is not self._linked.get(p, held):
            # replaced in our state: by offloading, a device move, ...
            _keep_on_host(self._linked[p], held, p.device)
            base_state[p] = held

    def holds(self, entries: Sequence[dict[str, Any]], base_state: Mapping[Tensor, Any]) -> bool:
        """True if F's dicts are those in our entries, or both are empty, as last remembered."""
        return (
            entries is self._remembered
            and all(map(is_, map(dict.get, entries, repeat("base")), self._shown))
            and self._base_state.holds(base_state)
            and not any(self._empty)
        )

    def remember(
        self,
        params: Sequence[Tensor],
        entries: Sequence[dict[str, Any]],
        base_state: Mapping[Tensor, Any],
    ) -> None:
        """Remember F's dicts and those in our entries, for ``holds``, if they are the same ones."""
        self._remembered, self._empty = None, []
        self._shown = list(map(dict.get, entries, repeat("base")))
        for p, shown in zip(params, self._shown, strict=True):
            held = base_state.get(p)
            if held is not shown:
                if held or shown or shown is None:
                    return
                self._empty += [shown] if held is None else [shown, held]
        self._remembered, self._base_state = entries, Snapshot(base_state)

    def join(
        self,
        state: MutableMapping[Tensor, dict[str, Any]],
        base_state: MutableMapping[Tensor, Any],
    ) -> None:
        """Show F's own dict in our state, for every parameter that F has state of."""
        for p in [p for p, own in base_state.items() if own and isinstance(p, Tensor)]:
            self.start(p, state, base_state)
            if p in base_state:  # else it has just gone with ours
                state[p]["base"] = self._linked[p] = base_state[p]


class StateKeeper:
    """Keeps the optimizer's state, the plan's stacks and F's state one, whoever changes them."""

    def __init__(self) -> None:
        self._binding, self._base_link = Binding(), BaseLink()
        self._tensors_intact = True  # when they were last compared

    def holds(
        self, plan: StepPlan, state: Mapping[Tensor, Any], base_state: Mapping[Tensor, Any]
    ) -> bool:
        """True if nobody has changed the state since the last step with this plan."""
        return (
            self._tensors_intact
            and plan.states.holds(state)
            and self._binding.holds_blocks()
            and self._base_link.holds(plan.entries, base_state)
        )

    def holds_tensors(self) -> bool:
        """True if no tensor inside of a block has been replaced. Compares all of them."""
        return self._binding.holds_tensors()

    def is_intact(self, state: Mapping[Tensor, Any]) -> bool:
        """True if the state holds all that was bound."""
        binding = self._binding
        return binding.holds_entries(state) and binding.holds_blocks() and binding.holds_tensors()

    def bind(self, plan: StatePlan, state: MutableMapping[Tensor, dict[str, Any]]) -> set[Tensor]:
        """Make the state's tensors views of a plan's stacks; see ``Binding.bind``."""
        unknown = self._binding.bind(plan, state)
        self._tensors_intact = True
        return unknown

    def after_step(
        self,
        plan: StepPlan,
        state: MutableMapping[Tensor, dict[str, Any]],
        base_state: MutableMapping[Tensor, Any],
    ) -> None:
        """Compare tensors, and show what F has put into its state or replaced there."""
        self._tensors_intact = self._binding.holds_tensors()
        if not self._base_link.holds(plan.entries, base_state):
            self._base_link.join(state, base_state)
            self._base_link.remember(plan.params, plan.entries, base_state)

    def start(
        self,
        p: Tensor,
        state: MutableMapping[Tensor, dict[str, Any]],
        base_state: MutableMapping[Tensor, Any],
    ) -> None:
        """Give a parameter a state; see ``BaseLink.start``."""
        self._base_link.start(p, state, base_state)

    def join(
        self,
        state: MutableMapping[Tensor, dict[str, Any]],
        base_state: MutableMapping[Tensor, Any],
    ) -> None:
        """Show F's state in ours; see ``BaseLink.join``."""
        self._base_link.join(state, base_state)
