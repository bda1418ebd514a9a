"""Ranks that hold the same state, as under DistributedDataParallel: each does a part of the work.

What they have found is gathered, so that every rank has the whole state again. All of it happens at
updates and refreshes; ordinary steps send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocks.batches import Part, due_parts
from kronbit.distributed.assignment import divide
from kronbit.distributed.collectives import digest, gather
from kronbit.messages import warn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kronbit.blocks.groups import DeviceStacks, Due
    from kronbit.factors import Factors

_LARGE = 64  # orders from here on


class Replicas:
    """The ranks of a group, of which each holds the whole state.

    Args:
        group: The ranks.
        device: Where bytes travel.
        given: Whether the user says that they hold the same parameters. If nobody does, ranks with
            other gradients are taken for trainings of their own.

    Attributes:
        divides: Whether the work is shared out at the moment.
        apart: How often ranks worked on their own, because their gradients differed.
        received: Bytes that this rank has got from others.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, given: bool) -> None:
        self.group, self._device, self._given = group, device, given
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.divides = False
        self.apart = 0
        self.received = 0

    def own(self, parts: Iterable[Part]) -> Iterable[Part]:
        """The rows that this rank does: its share, or all."""
        if not self.divides:
            return parts
        parts = list(parts)
        small = [part for part in parts if not _worth_sending(part.factors)]
        return [*divide(_large(parts), self.ranks)[self.rank], *small]

    @contextmanager
    def shared(
        self,
        stacks: DeviceStacks,
        due: Mapping[int, Due],
        norms: Tensor,
        wanted: Callable[[str], bool],
    ) -> Iterator[None]:
        """See ``Exchange.shared``.

        Raises:
            RuntimeError: If ranks disagree on what is to be done, before anything is changed; or if
                one of them has failed.
        """
        if not self._alike(stacks, due, norms):
            self.apart += 1
            yield
            return
        both = (side for group in stacks.groups for side in (group.left, group.right))
        sides = list(filter(_worth_sending, both))
        before = [dict(side.counters) for side in sides]
        failure: Exception | None = None
        self.divides = True
        try:
            yield
        except Exception as error:  # the others must hear of it: they wait
            failure = error
        finally:
            self.divides = False
        new = [
            side.counters[name] - count
            for side, own in zip(sides, before, strict=True)
            for name, count in own.items()
        ]
        new, failed = self._added_up(new, failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError(
                f"an update or a refresh has failed on rank {failed[0]} of {self.ranks}, which "
                "says why; states of ranks differ now: load the last checkpoint"
            )
        sums = iter(new)
        for side, own in zip(sides, before, strict=True):
            for name, count in own.items():
                side.counters[name] = count + next(sums)
        streams = [
            [
                tensor[part.rows]
                for part in parts
                for name, tensor in part.factors.tensors.items()
                if wanted(name)
            ]
            for parts in divide(_large(due_parts(stacks.groups, due)), self.ranks)
        ]
        self.received += gather(streams, self.group, self._device, stacks.workspace)

    def _alike(self, stacks: DeviceStacks, due: Mapping[int, Due], norms: Tensor) -> bool:
        """Whether all ranks have the same work and the same gradients."""
        members = [member.blocking.matrices for member in stacks.members]
        configs = {id(own.config): own.config for own in due.values()}
        names = {key: number for number, key in enumerate(configs)}
        turns = [(i, names[id(own.config)], sorted(own.turns or ())) for i, own in due.items()]
        work = repr((members, list(configs.values()), turns, stacks.workspace))
        values = norms[: len(members)].cpu().numpy().tobytes()
        mine = torch.tensor([digest(work.encode()), digest(values)], device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(found, mine, group=self.group)
        works, gradients = map(set, zip(*(own.tolist() for own in found), strict=True))
        if len(works) > 1:
            raise RuntimeError(
                f"the {self.ranks} ranks disagree on which parameters are due at this step: their "
                "parameters, options or numbers of steps differ. Give process_group= the ranks "
                "that hold the same parameters, or process_group=False"
            )
        if len(gradients) > 1 and self._given:
            raise RuntimeError(
                f"gradients differ between the {self.ranks} ranks of process_group: average them "
                "before the step, as DistributedDataParallel does, or give process_group=False"
            )
        if len(gradients) > 1 and not self.apart:
            warn(
                f"gradients differ between the {self.ranks} ranks, so each of them does all of its "
                "updates and refreshes itself; process_group=False says that this is meant"
            )
        return len(gradients) == 1

    def _added_up(self, counts: list[int], failed: bool) -> tuple[list[int], list[int]]:
        """The sums of counts over all ranks, and the ranks that have failed."""
        flags = [int(failed and rank == self.rank) for rank in range(self.ranks)]
        both = torch.tensor([*counts, *flags], dtype=torch.int64, device=self._device)
        dist.all_reduce(both, group=self.group)
        sums = both.tolist()
        return sums[: len(counts)], [i for i, flag in enumerate(sums[len(counts) :]) if flag]


def _worth_sending(factors: Factors) -> bool:
    """Whether rows are shared out: small ones are done by every rank before they could arrive."""
    return factors.order >= _LARGE


def _large(parts: Iterable[Part]) -> list[Part]:
    return [part for part in parts if _worth_sending(part.factors)]
