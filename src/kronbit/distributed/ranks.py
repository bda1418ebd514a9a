"""What an optimizer knows of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocking import Blocking
from kronbit.config import GLOBAL_OPTIONS, GROUP_OPTIONS
from kronbit.distributed.exchange import Alone, Exchange
from kronbit.distributed.ownership import Owners
from kronbit.distributed.placements import Placement, placement_of, travels_on
from kronbit.distributed.replicated import Replicas
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
    """

    def __init__(
        self,
        exchange: Exchange,
        owners: Owners | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.exchange, self.owners = exchange, owners
        self._group = group

    def owns(self, p: Tensor) -> bool:
        """Whether the state of a parameter is here."""
        return self.owners is None or self.owners.owns(p)

    def whole(self, present: Present) -> AbstractContextManager[Present]:
        """Gradients as they are preconditioned here; see ``Owners.whole``."""
        return nullcontext(present) if self.owners is None else self.owners.whole(present)

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

    def agree(self, lines: list[str]) -> None:
        """Compare what ranks are about to do, before their first step.

        Args:
            lines: What must be equal, one by one.

        Raises:
            RuntimeError: On every rank, if a line differs.
        """
        if self._group is None:
            return
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
    """Look for other ranks, and make sure that they are about to do the same.

    Raises:
        ValueError: If parameters are on several meshes, or ranks cannot talk to each other.
        RuntimeError: If ranks disagree.
    """
    route, config = optimizer._statistics.route, optimizer.config
    rows = [(p, route(p, own)) for _, p, own in optimizer._rows()]
    workspace = int(config.workspace_mb * 2**20)
    found = _find(rows, optimizer._process_group, config.shard_state, workspace)
    found.agree(told(optimizer))
    return found


def _find(
    rows: Sequence[tuple[Tensor, Blocking | str]],
    process_group: ProcessGroup | Literal[False] | None,
    shard_state: bool,
    workspace: int,
) -> Ranks:
    there = dist.is_available() and dist.is_initialized()
    sharded = {}
    for p, _ in rows:
        placement = placement_of(p)
        if placement is not None:
            sharded[p] = placement
    if not rows or not there or (process_group is False and not sharded):
        return Ranks(Alone())
    device = rows[0][0].device
    cut = [(p, way) for p, way in rows if isinstance(way, Blocking)]
    if sharded:
        placement = _only(sharded.values())
        group, copies = placement.group(), placement.copies()
        owners = Owners(group, _route(group, device), workspace)
        owners.share_out((p, way) for p, way in cut if p in sharded)
        exchange = Alone() if copies is None else Replicas(copies, _route(copies, device), True)
        return Ranks(exchange, owners, group)
    everybody = process_group or dist.group.WORLD
    assert everybody is not None
    group = everybody
    if dist.get_rank(group) < 0 or (dist.get_world_size(group) == 1 and process_group is None):
        return Ranks(Alone())
    if shard_state:
        owners = Owners(group, _route(group, device), workspace)
        owners.share_out(cut)
        return Ranks(Alone(), owners, group)
    if process_group is None and travels_on(group, device) is None:
        return Ranks(Alone())
    exchange = Replicas(group, _route(group, device), process_group is not None)
    return Ranks(exchange, None, group)


def _only(placements: Iterable[Placement]) -> Placement:
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
