"""What an optimizer knows of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from kronbit.blocks.blocking import Blocking
from kronbit.blocks.gradients import plain_dtypes
from kronbit.config import GLOBAL_OPTIONS, GROUP_OPTIONS, Config
from kronbit.distributed.exchange import Alone, Exchange
from kronbit.distributed.owners import Owners
from kronbit.distributed.replicas import Replicas
from kronbit.distributed.sharding import (
    is_distributed,
    local_gradients,
    placement_of,
    travels_on,
)
from kronbit.messages import parameter_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kronbit.blocks.gradients import StepGradients


class Ranks:
    """Who has which state, and who does what.

    Args:
        exchange: Shares work out among ranks that hold the same state.
        owners: Of parameters whose state is on one rank each, if there are some.
        group: All ranks that take steps together, if there are several.
        localises: Whether there are DTensors, of which this rank takes what it has.
        device: Where messages of the group travel.
    """

    def __init__(
        self,
        exchange: Exchange,
        owners: Owners | None = None,
        group: ProcessGroup | None = None,
        localises: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.exchange, self.owners = exchange, owners
        self._group, self.localises = group, localises
        self._agreed, self._device = group is None, device

    def owns(self, p: Tensor) -> bool:
        """Whether the state of a parameter is here."""
        return self.owners is None or self.owners.owns(p)

    @property
    def first(self) -> bool:
        """Whether this rank is the first of all that take steps together."""
        copies = self.exchange.rank if isinstance(self.exchange, Replicas) else 0
        return copies == 0 and (self.owners is None or self.owners.rank == 0)

    def whole(
        self, present: StepGradients, is_due: Callable[[], bool]
    ) -> AbstractContextManager[Any]:
        """Gradients as they are preconditioned here; see ``Owners.whole``.

        Args:
            present: The step's gradients.
            is_due: Returns True if an update or a refresh falls on this step.
        """
        if self.owners is not None:
            return self.owners.whole(present, careful=is_due())
        if self.localises:
            grads = local_gradients(present)
            present = present._replace(grads=grads, dtypes=plain_dtypes(grads))
        return nullcontext(present)

    def grow(self, larger: Ranks) -> None:
        """Take new parameters in; the owner of a parameter goes on owning it.

        Args:
            larger: The result of ``find_ranks`` with the new parameters.
        """
        if self.owners is not None and larger.owners is not None:
            larger.owners.keep(self.owners)
        if isinstance(self.exchange, Replicas) and isinstance(larger.exchange, Replicas):
            larger.exchange = self.exchange
        vars(self).update(vars(larger))  # in place: a trainer's wrapper cannot set our attributes

    def figures(self) -> dict[str, int]:
        """For ``diagnostics``.

        Of the ranks that share work out: how many there are, how often they worked on their own
        because gradients differed, and the bytes that this one got of statistics and roots. Of
        those that own parameters: how many, and the bytes of gradients that this one sent, or got.
        """
        found: dict[str, int] = {}
        if isinstance(self.exchange, Replicas):
            own = self.exchange
            found |= {"replicas": own.ranks, "apart": own.apart, "received_bytes": own.received}
        if self.owners is not None:
            found |= {"owners": self.owners.ranks, "gradient_bytes": self.owners.bytes}
        return found

    def refuse_partial_state(self) -> None:
        """Raise if this rank has a part of the state only."""
        if self.owners is not None:
            raise RuntimeError(
                "with shard_state=True a rank has a part of the state only: let all ranks call "
                "kronbit.consolidate_state_dict(optimizer), and one of them save what it returns"
            )

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank that this one must not leave waiting."""
        if self.owners is not None:
            return self.owners.any_rank(flag)
        if self.localises and self._group is not None:
            found = torch.tensor([int(flag)], device=self._device)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
            return bool(found.item())
        return flag

    def together(self) -> AbstractContextManager[None]:
        """Let all owners know if one of them fails inside; see ``Owners.together``."""
        return nullcontext() if self.owners is None else self.owners.together()

    def agree(self, agreement_lines: Callable[[], list[str]]) -> None:
        """Compare what ranks are about to do, before their first step.

        Args:
            agreement_lines: Returns the lines that all ranks must have in common.

        Raises:
            RuntimeError: On every rank, if they differ.
        """
        if self._agreed:
            return
        lines = agreement_lines()
        found: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        on_gpu = self._device is not None and self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            dist.all_gather_object(found, lines, group=self._group)
        for rank, other in enumerate(found):
            for a, b in zip_longest(found[0], other, fillvalue="nothing more"):
                if a != b:
                    raise RuntimeError(
                        f"rank {rank} of {len(found)} has {b}, where rank 0 has {a}: ranks must "
                        "have the same parameters and options. Give process_group= the ranks that "
                        "do, or process_group=False to let every rank work for itself"
                    )
        self._agreed = True


def agreement_lines(
    optimizer: Optimizer, base: Optimizer, config: Config, state: Mapping[Tensor, Any]
) -> list[str]:
    """Return, line by line, what ranks that step together must have in common.

    Args:
        optimizer: The second-order optimizer.
        base: F.
        config: The optimizer's options.
        state: The optimizer's state, with the number of steps of each parameter.
    """
    lines = [type(optimizer).__name__, f"base {type(base).__name__}"]
    lines += [f"{name}={getattr(config, name)!r}" for name in sorted(GLOBAL_OPTIONS)]
    for index, group in enumerate(optimizer.param_groups):
        own = config.for_group(group)
        lines += [f"group {index}: {name}={getattr(own, name)!r}" for name in GROUP_OPTIONS]
        lines += [
            f"{parameter_name(group, index, number)} of shape {tuple(p.shape)} and {p.dtype}"
            for number, p in enumerate(group["params"])
        ]
    steps = {entry.get("step", 0) for entry in state.values()}
    return [*lines, f"parameters after {sorted(steps) or [0]} steps"]


def find_ranks(
    parameters: Sequence[tuple[Tensor, Config]],
    config: Config,
    process_group: ProcessGroup | Literal[False] | None,
    route: Callable[[Tensor, Config], Blocking | str],
) -> Ranks:
    """Look for other ranks.

    Args:
        parameters: All parameters with their options.
        config: The optimizer's options.
        process_group: As given to the optimizer.
        route: How a parameter is cut, or why it is left to F.

    Raises:
        ValueError: If ranks cannot talk to each other, or options do not go with them.
    """
    cut = [(p, way) for p, own in parameters if isinstance(way := route(p, own), Blocking)]
    localises = any(is_distributed(p) for p, _ in parameters)
    # Whatever this rank has of them: the others must come to the same conclusion.
    sharded = {p: place for p, own in parameters if own.precondition and (place := placement_of(p))}
    if not (cut or sharded) or not (dist.is_available() and dist.is_initialized()):
        return Ranks(Alone(), localises=localises)
    device, workspace = parameters[0][0].device, int(config.workspace_mb * 2**20)
    if sharded:
        placement = next(iter(sharded.values()))  # all are on one mesh
        group, copies = placement.group(), placement.copies()
        travels = _route(group, device)
        exchange: Exchange = Alone()
        if copies is not None and process_group is not False:
            exchange = Replicas(copies, _route(copies, device), True)
        if config.blocks == "local":
            return Ranks(exchange, None, group, localises, travels)
        _refuse_stagger(own for _, own in parameters)
        spreads = config.nonfinite != "raise"
        owners = Owners(group, travels, workspace, placement, spreads)
        owners.share_out([(p, way) for p, way in cut if p in sharded])
        return Ranks(exchange, owners, group, device=travels)
    everybody = process_group or dist.group.WORLD
    if process_group is False or everybody is None or dist.get_rank(everybody) < 0:
        return Ranks(Alone(), localises=localises)
    if process_group is None and (
        dist.get_world_size(everybody) == 1 or travels_on(everybody, device) is None
    ):
        return Ranks(Alone(), localises=localises)
    travels = _route(everybody, device)
    if config.shard_state:
        _refuse_stagger(own for _, own in parameters)
        owners = Owners(everybody, travels, workspace)
        owners.share_out(cut)
        return Ranks(Alone(), owners, everybody, device=travels)
    exchange = Replicas(everybody, travels, process_group is not None)
    return Ranks(exchange, None, everybody, localises, travels)


def _refuse_stagger(configs: Iterable[Config]) -> None:
    if any(own.stagger for own in configs):
        raise ValueError(
            "stagger=True spreads the blocks of all parameters over steps, but where parameters "
            "have owners (FSDP2, shard_state=True) no rank has all of them: leave it out"
        )


def _route(group: ProcessGroup, device: torch.device) -> torch.device:
    found = travels_on(group, device)
    if found is None:
        raise ValueError(
            f"process_group cannot send tensors of {device.type}: initialise it with a backend for "
            "that device"
        )
    return found
