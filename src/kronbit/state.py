"""The optimizer's state: the plan's tensors, and F's own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from kronbit.factors import Layout, Leaves
from kronbit.plan import Plan

# Names that are not blocks in the state of a parameter.
OWN_KEYS = ("step", "base")


def blocks_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks in the state of a parameter."""
    return {key: value for key, value in entry.items() if key not in OWN_KEYS}


def checked_leaves(values: Any, layout: Layout, where: str) -> Leaves:
    """The tensors of one side of a block, if they are what the layout says.

    Args:
        values: Name -> tensor, from outside.
        layout: What is expected.
        where: The place of ``values``, for messages.

    Raises:
        ValueError: If a tensor is missing, unknown, of another dtype or shape, or holds impossible
            numbers; by name.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is missing or not a dict")
    for name in values.keys() - layout.keys():
        raise ValueError(f"{where}[{name!r}] is unknown; expected {', '.join(layout)}")
    leaves: Leaves = {}
    for name, (shape, dtype) in layout.items():
        if name not in values:
            raise ValueError(f"{where}[{name!r}] is missing")
        value = values[name]
        if not isinstance(value, Tensor) or value.dtype != dtype:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{where}[{name!r}] is {kind}; expected a tensor of {dtype}")
        if tuple(value.shape) != shape:
            raise ValueError(f"{where}[{name!r}] has shape {tuple(value.shape)}; expected {shape}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{where}[{name!r}] holds non-finite values")
        if name.endswith(("scales", "eigenvalues")) and bool((value < 0).any()):
            raise ValueError(f"{where}[{name!r}] holds negative values")
        leaves[name] = value
    return leaves


class Binding:
    """Keeps the state's tensors and the plan's stacks one.

    State leaves are views into the stacks. Others may replace or remove them (offloading, device
    moves, a reset): ``intact`` notices, by identity.
    """

    def __init__(self) -> None:
        self._state: Mapping[Tensor, Any] | None = None
        self._nodes: list[tuple[Mapping[Any, Any], Any, Any]] = []

    def intact(self, state: Mapping[Tensor, Any]) -> bool:
        """Whether every dict and tensor is still the one that was put there."""
        return state is self._state and all(
            container.get(key) is value for container, key, value in self._nodes
        )

    def bind(self, plan: Plan, state: MutableMapping[Tensor, dict[str, Any]]) -> bool:
        """Put the plan's views into the state; values that the state already holds are kept.

        Returns:
            Whether the state held any.

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
        self._state = state
        self._nodes = [(state, p, state[p]) for p in plan.places]
        for block, values in zip(blocks, held, strict=True):
            views = {side: factors.slot(block.row) for side, factors in block.sides.items()}
            for side, leaves in (values or {}).items():
                for name, value in leaves.items():
                    views[side][name].copy_(value)
            state[block.p][block.key] = views
            self._nodes.append((state[block.p], block.key, views))
            for side, leaves in views.items():
                self._nodes.append((views, side, leaves))
                self._nodes += [(leaves, name, tensor) for name, tensor in leaves.items()]
        return any(values is not None for values in held)


class BaseLink:
    """Keeps ``state[p]["base"]`` and F's own dict one, whichever of the two is replaced."""

    def __init__(self) -> None:
        self._linked: dict[Tensor, Any] = {}

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
            base_state[p] = held  # replaced in our state: by offloading, a device move, ...

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
