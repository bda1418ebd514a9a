"""Which parameter is preconditioned where: routing, and the state of all blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kronbit.blocking import Blocking, block
from kronbit.config import STRUCTURAL_OPTIONS, Config, Format
from kronbit.factors import Leaves
from kronbit.groups import Member
from kronbit.preconditioner import Preconditioner
from kronbit.rules import Rule

# The state of one block: {"left": {name: tensor}, "right": {name: tensor}}.
BlockState: TypeAlias = dict[str, Leaves]


@dataclass(frozen=True)
class Algorithm:
    """What tells the algorithms apart.

    Attributes:
        rule: (L̂, G, R̂) -> Ĝ.
        p: The roots are L^(-1/p) and R^(-1/p).
        start: Start value of the statistics; ``None``: ε.
    """

    rule: Rule
    p: int
    start: float | None


@dataclass(frozen=True)
class Place:
    """Where a parameter's state is: member ``index`` of the preconditioner of ``device``."""

    device: torch.device
    index: int
    shape: torch.Size
    config: Config


def route(p: Tensor, config: Config) -> Blocking | str:
    """How a parameter is cut, or why it is left to F."""
    return block(tuple(p.shape), config)


def structural_changes(old: Config, new: Config) -> list[str]:
    """What was changed of the options that decide what is stored, in words."""
    values = ((name, getattr(old, name), getattr(new, name)) for name in STRUCTURAL_OPTIONS)
    return [f"{name} was changed from {a!r} to {b!r}" for name, a, b in values if a != b]


class Plan:
    """The preconditioners, one per device, and each parameter's place in them.

    Args:
        params: Parameters with their options, in the order of the param groups. Those that are
            left to F get no place.
        algorithm: Rule, root and start value.
        workspace: Bound of transient memory in bytes.
    """

    def __init__(
        self, params: Iterable[tuple[Tensor, Config]], algorithm: Algorithm, workspace: int
    ) -> None:
        members: dict[torch.device, list[Member]] = {}
        self.places: dict[Tensor, Place] = {}
        for p, config in params:
            row = members.setdefault(p.device, [])
            blocking = route(p, config)
            if isinstance(blocking, Blocking):
                self.places[p] = Place(p.device, len(row), p.shape, config)
                row.append(Member(blocking, config))
        self.preconditioners = {
            device: Preconditioner(
                row, algorithm.rule, algorithm.p, algorithm.start, workspace, device
            )
            for device, row in members.items()
        }

    def blocks(self) -> Iterator[tuple[Tensor, str, BlockState, dict[str, Format]]]:
        """Every block: its parameter, its key, its state as views, and the sides' formats."""
        params = {(place.device, place.index): p for p, place in self.places.items()}
        for device, preconditioner in self.preconditioners.items():
            for group in preconditioner.groups:
                sides = {"left": group.left, "right": group.right}
                formats = {side: factors.format for side, factors in sides.items()}
                for span in group.spans:
                    for row, piece in enumerate(span.grid.blocks(), span.start):
                        state = {side: factors.slot(row) for side, factors in sides.items()}
                        p = params[device, span.member]
                        yield p, f"block_{piece.index}", state, formats

    def refreshed(self) -> set[Tensor]:
        """Parameters with a root that is not the identity. Waits for the device."""
        found = {device: pre.refreshed() for device, pre in self.preconditioners.items()}
        return {p for p, place in self.places.items() if place.index in found[place.device]}


class Binding:
    """The plan's tensors as the optimizer's state.

    State leaves are views into the groups' stacks. Others may replace them (offloading, device
    moves): ``intact`` notices, by identity, and ``bind`` copies the values back.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[Mapping[Any, Any], Any, Any]] = []

    def intact(self) -> bool:
        """Whether every dict and tensor is still the one that was put there."""
        return all(container.get(key) is value for container, key, value in self._nodes)

    def bind(self, plan: Plan, state: MutableMapping[Tensor, dict[str, Any]]) -> bool:
        """Put the plan's views into the state; values that the state already holds are kept.

        Returns:
            Whether the state held any.

        Raises:
            ValueError: If a held tensor does not fit; nothing is changed then.
        """
        blocks = [(p, key, views) for p, key, views, _ in plan.blocks()]
        held = [state.get(p, {}).get(key) for p, key, _ in blocks]
        for (p, key, views), values in zip(blocks, held, strict=True):
            if values is not None:
                check_fit(values, views, f"state of a parameter of shape {tuple(p.shape)}: {key}")
        nodes: list[tuple[Mapping[Any, Any], Any, Any]] = []
        for (p, key, views), values in zip(blocks, held, strict=True):
            if values is not None:
                copy_block(values, views)
            state[p][key] = views
            nodes += [(state[p], key, views)]
            for side, leaves in views.items():
                nodes += [(views, side, leaves)]
                nodes += [(leaves, name, tensor) for name, tensor in leaves.items()]
        nodes += [(state, p, state[p]) for p in plan.places]
        self._nodes = nodes
        return any(values is not None for values in held)


def check_fit(values: Any, views: BlockState, label: str) -> None:
    """Refuse a block whose tensors are missing or have another shape, by key."""
    for side, leaves in views.items():
        for name, tensor in leaves.items():
            key = f"{label}.{side}.{name}"
            try:
                shape = tuple(values[side][name].shape)
            except (KeyError, TypeError, AttributeError):
                raise ValueError(f"{key} is missing or not a tensor") from None
            if shape != tuple(tensor.shape):
                raise ValueError(f"{key} has shape {shape}; expected {tuple(tensor.shape)}")


def copy_block(values: BlockState, views: BlockState) -> None:
    """Copy a block's tensors into the stacks, across devices if need be."""
    for side, leaves in views.items():
        for name, tensor in leaves.items():
            if values[side][name] is not tensor:
                tensor.copy_(values[side][name])
