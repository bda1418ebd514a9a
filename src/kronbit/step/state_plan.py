"""The plan of the state: the device, member index and blocks of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.blocking import Blocking, Route
from kronbit.blocks.groups import Member, Turn
from kronbit.config import CUT_OPTIONS, FORMAT_OPTIONS, Config
from kronbit.distributed.exchange import Exchange
from kronbit.distributed.sharding import first_rows
from kronbit.factors import Factors
from kronbit.linalg.backend import backend
from kronbit.linalg.precision import FLOAT32
from kronbit.rules import Algorithm
from kronbit.step.preconditioner import Preconditioner

# A block: its parameter, its key in the state, its row, and the factors of each side.
PlannedBlock: TypeAlias = tuple[Tensor, str, int, dict[str, Factors]]


class StatePlan:
    """The preconditioners, one per device, and each parameter's location in them.

    Args:
        params: Parameters with their options, in order. Parameters left to F get no location.
        algorithm: The algorithm.
        options: The optimizer's options. ``workspace_mb``, ``cuda_graph`` and ``blocks`` are used.
        route: Returns the cut of a parameter, or the reason why it is left to F.
        exchange: Divides work among ranks that hold the same state.

    Attributes:
        locations: Parameter -> its preconditioner's device, and its index among the members.
        preconditioners: Device -> its preconditioner.
    """

    def __init__(
        self,
        params: Iterable[tuple[Tensor, Config]],
        algorithm: Algorithm,
        options: Config,
        route: Route,
        exchange: Exchange,
    ) -> None:
        members: dict[torch.device, list[Member]] = {}
        dtypes: dict[torch.device, set[torch.dtype]] = {}
        self.locations: dict[Tensor, tuple[torch.device, int]] = {}
        self._shapes: dict[Tensor, torch.Size] = {}
        self._rows = first_rows if options.blocks == "local" else lambda p: ""
        self._route = route
        for p, config in params:
            if p in self.locations:
                continue  # listed twice: torch only warns
            on_device = members.setdefault(p.device, [])
            dtypes.setdefault(p.device, set()).add(p.dtype)
            blocking = route(p, config)
            if isinstance(blocking, Blocking):
                self.locations[p], self._shapes[p] = (p.device, len(on_device)), p.shape
                on_device.append(Member(blocking, config))
        for device, on_device in members.items():
            if backend(device).by_kernels and device.type == "cuda":
                from kronbit.step.warm_up import warm_up

                all_bf16 = dtypes[device] == {torch.bfloat16}
                dtype = torch.bfloat16 if all_bf16 else torch.float32
                for config in {member.config for member in on_device}:
                    warm_up(device, algorithm, config, dtype)
        workspace = int(options.workspace_mb * 2**20)
        self.preconditioners = {
            device: Preconditioner(
                on_device, algorithm, workspace, options.cuda_graph, device, exchange
            )
            for device, on_device in members.items()
        }

    def lacks_any_of(
        self, params: Iterable[Tensor], configs: Iterable[Config], name: Callable[[Tensor], str]
    ) -> bool:
        """True if a parameter needs a location on its device and has none.

        Raises:
            ValueError: If the state of any parameter no longer fits its shape or options.
        """
        lacking = [self._lacks(p, config, name) for p, config in zip(params, configs, strict=True)]
        return any(lacking)

    def _lacks(self, p: Tensor, config: Config, name: Callable[[Tensor], str]) -> bool:
        if p.device not in self.preconditioners:
            return True
        if p not in self.locations:
            return isinstance(self._route(p, config), Blocking)
        if self._shapes[p] != p.shape:
            raise ValueError(
                f"the shape of {name(p)} has changed from {tuple(self._shapes[p])} to "
                f"{tuple(p.shape)} and its state does not fit: build a new optimizer"
            )
        preconditioner, index = self.of(p)
        change = _forbidden_change(preconditioner.stacks.members[index].config, config)
        if change:
            raise ValueError(f"group of {name(p)}: {change}")
        return preconditioner.stacks.device != p.device

    def of(self, p: Tensor) -> tuple[Preconditioner, int]:
        """Return the preconditioner of a parameter, and the parameter's index among its members."""
        device, index = self.locations[p]
        return self.preconditioners[device], index

    def turns(self, p: Tensor) -> tuple[Turn, ...] | None:
        """Return the turns of a parameter under ``stagger``; None if it has no location."""
        if p not in self.locations:
            return None
        preconditioner, index = self.of(p)
        return preconditioner.turns[index]

    def blocks(self) -> Iterator[PlannedBlock]:
        """Yield every block of every parameter."""
        params = {location: p for p, location in self.locations.items()}
        for device, preconditioner in self.preconditioners.items():
            for group in preconditioner.stacks.groups:
                sides = {"left": group.left, "right": group.right}
                for span in group.spans:
                    p = params[device, span.member]
                    for row, block in enumerate(span.blocks(), span.start):
                        yield p, f"{self._rows(p)}block_{block.index}", row, sides

    def derive_product_bits(
        self, params: Iterable[Tensor], state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Derive ``product_bits`` from the roots, for state that lacks it. Waits for the device."""
        for p in params:
            if p in self.locations:
                preconditioner, index = self.of(p)
                stacks = preconditioner.stacks
                preconditioner.find_refreshed([index], whole=stacks.members[index].config.stagger)
                state[p]["product_bits"] = FLOAT32 if index in stacks.refreshed else 0


def _forbidden_change(old: Config, new: Config) -> str | None:
    """Describe a changed option that must not change once state exists, with a remedy."""
    remedies = {
        FORMAT_OPTIONS: "save state_dict() and load it into an optimizer with the new value",
        CUT_OPTIONS: "statistics of other blocks must start fresh: build an optimizer with the new "
        "value, and load base.state_dict() of the old one into it",
    }
    for names, remedy in remedies.items():
        for name in names:
            a, b = getattr(old, name), getattr(new, name)
            if a != b:
                return f"{name} was changed from {a!r} to {b!r} after state was created: {remedy}"
    return None
