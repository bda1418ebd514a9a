"""What an optimizer knows of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocking import Blocking
from kronbit.config import GLOBAL_OPTIONS, GROUP_OPTIONS
from kronbit.distributed.exchange import Alone, Exchange
from kronbit.distributed.ownership import Owners
from kronbit.distributed.placements import (
    Placement,
    is_distributed,
    local,
    placement_of,
    travels_on,
)
from kronbit.distributed.replicated import Replicas
from kronbit.gradients import plain_dtypes
from kronbit.report import parameter_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kronbit.optimizer import SecondOrder
    from kronbit.work import Present


class Ranks:
    """Who has which state, and who does what.

    Args:
        exchange: Shares work out among ranks that hold the same state.
        owners: Of parameters whose state is on one rank each, if there are some.
        group: All ranks that take steps together, if there are several.
        localises: Whether there are DTensors, of which this rank takes what it has.
    """

    def __init__(
        self,
        exchange: Exchange,
        owners: Owners | None = None,
        group: ProcessGroup | None = None,
        localises: bool = False,
    ) -> None:
        self.exchange, self.owners = exchange, owners
        self._group, self.localises = group, localises
        self._agreed = group is None

    def owns(self, p: Tensor) -> bool:
        """Whether the state of a parameter is here."""
        return self.owners is None or self.owners.owns(p)

    def whole(self, present: Present) -> AbstractContextManager[Present]:
        """Gradients as they are preconditioned here; see ``Owners.whole``."""
        if self.owners is not None:
            return self.owners.whole(present)
        if self.localises:
            grads = list(map(local, present.grads))
            present = present._replace(grads=grads, dtypes=plain_dtypes(grads))
        return nullcontext(present)

    def grown(self, optimizer: SecondOrder) -> Ranks:
        """The same with new parameters; who owns a parameter goes on owning it."""
        found = find_ranks(optimizer)
        if self.owners is not None and found.owners is not None:
            found.owners.keep(self.owners)
        return found

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
            found |= {"owners": self.owners.ranks, "gradient_bytes": self.owners.sent}
        return found

    def refuse_partial_state(self) -> None:
        """Raise if this rank has a part of the state only."""
        if self.owners is not None:
            raise RuntimeError(
                "with shard_state=True a rank has a part of the state only: let all ranks call "
                "kronbit.consolidate_state_dict(optimizer), and one of them save what it returns"
            )

    def anyone(self, flag: bool) -> bool:
        """Whether it is so on any rank that this one must not leave waiting."""
        return flag if self.owners is None else self.owners.anyone(flag)

    def agree(self, optimizer: SecondOrder) -> None:
        """Compare what ranks are about to do, before their first step.

        Raises:
            RuntimeError: On every rank, if they differ.
        """
        if self._agreed:
            return
        lines = told(optimizer)
        found: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
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


def told(optimizer: SecondOrder) -> list[str]:
    """What ranks that step together must have in common, line by line."""
    lines = [type(optimizer).__name__, f"base {type(optimizer.base).__name__}"]
    config = optimizer.config
    lines += [f"{name}={getattr(config, name)!r}" for name in sorted(GLOBAL_OPTIONS)]
    for index, group in enumerate(optimizer.param_groups):
        own = config.for_group(group)
        lines += [f"group {index}: {name}={getattr(own, name)!r}" for name in GROUP_OPTIONS]
        lines += [
            f"{parameter_name(group, index, number)} of shape {tuple(p.shape)} and {p.dtype}"
            for number, p in enumerate(group["params"])
        ]
    return lines


def find_ranks(optimizer: SecondOrder) -> Ranks:
    """Look for other ranks.

    Raises:
        ValueError: If parameters are on several meshes, or ranks cannot talk to each other.
    """
    config, process_group = optimizer.config, optimizer._process_group
    rows = [(p, optimizer._statistics.route(p, own)) for _, p, own in optimizer._rows()]
    cut = [(p, way) for p, way in rows if isinstance(way, Blocking)]
    localises = any(is_distributed(p) for p, _ in rows)
    sharded = {p: placement for p, _ in rows if (placement := placement_of(p)) is not None}
    if not cut or not (dist.is_available() and dist.is_initialized()):
        return Ranks(Alone(), localises=localises)
    device, workspace = cut[0][0].device, int(config.workspace_mb * 2**20)
    if any(p in sharded for p, _ in cut):
        placement = _only([sharded[p] for p, _ in cut if p in sharded])
        group, copies = placement.group(), placement.copies()
        exchange = Alone() if copies is None else Replicas(copies, _route(copies, device), True)
        if config.blocks == "local":
            return Ranks(exchange, None, group, localises)
        owners = Owners(group, _route(group, device), workspace, placement)
        owners.share_out((p, way) for p, way in cut if p in sharded)
        return Ranks(exchange, owners, group)
    everybody = process_group or dist.group.WORLD
    if process_group is False or everybody is None or dist.get_rank(everybody) < 0:
        return Ranks(Alone(), localises=localises)
    if process_group is None and (
        dist.get_world_size(everybody) == 1 or travels_on(everybody, device) is None
    ):
        return Ranks(Alone(), localises=localises)
    route = _route(everybody, device)
    if config.shard_state:
        owners = Owners(everybody, route, workspace)
        owners.share_out(cut)
        return Ranks(Alone(), owners, everybody)
    return Ranks(Replicas(everybody, route, process_group is not None), None, everybody, localises)


def _only(placements: Sequence[Placement]) -> Placement:
    first, *others = placements
    for other in others:
        if other != first:
            raise ValueError(
                f"parameters are sharded over several meshes, {first.mesh} and {other.mesh}: "
                "build an optimizer for each"
            )
    return first


def _route(group: ProcessGroup, device: torch.device) -> torch.device:
    found = travels_on(group, device)
    if found is None:
        raise ValueError(
            f"process_group cannot send tensors of {device.type}: initialise it with a backend for "
            "that device"
        )
    return found
