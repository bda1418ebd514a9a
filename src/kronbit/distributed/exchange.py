"""Ranks that hold the same state, as in DistributedDataParallel: each does a part of the work.

Results are gathered, so that every rank has the whole state again. Ordinary steps send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from kronbit.blocks.batches import Part, due_parts
from kronbit.distributed.assignment import divide
from kronbit.distributed.collectives import Link, gather
from kronbit.messages import warn

if TYPE_CHECKING:
    from kronbit.blocks.groups import DeviceStacks, DueMembers

_LARGE = 64  # smallest order that is worth sending: computing smaller rows is faster


class Exchange:
    """Divides updates and refreshes among the ranks of a group, each of which has the whole state.

    Args:
        link: The ranks; None for a single rank, which does all of the work.
        given: True if the user has declared that the ranks hold the same parameters. If not, ranks
            with different gradients are treated as independent training runs.

    Attributes:
        divides: True while the work is divided among the ranks.
        apart: Number of times that each rank did all of the work, because gradients differed.
        received: Bytes that this rank has received from others.
    """

    def __init__(self, link: Link | None = None, given: bool = False) -> None:
        self.link, self._given = link, given
        self.divides = False
        self.apart = 0
        self.received = 0

    def assigned(self, parts: Iterable[Part]) -> Iterable[Part]:
        """Return the rows that this rank computes: its share, or all."""
        if self.link is None or not self.divides:
            return parts
        parts = list(parts)
        small = [part for part in parts if part.factors.order < _LARGE]
        return [*_shares(parts, self.link)[self.link.rank], *small]

    @contextmanager
    def shared(
        self,
        stacks: DeviceStacks,
        due: DueMembers,
        norms: Tensor,
        wanted: Callable[[str], bool],
    ) -> Iterator[None]:
        """Let each rank compute its share of the rows inside; at the end, all ranks have all rows.

        Args:
            stacks: The state.
            due: Members that are due, with their options and blocks.
            norms: Norms of gradients. Ranks with different norms do not hold the same state.
            wanted: Returns True for the name of a tensor that is written.

        Raises:
            RuntimeError: If ranks disagree before the work, or one of them has failed.
        """
        link = self.link
        if link is None or not self._same_gradients(link, stacks, due, norms):
            yield
            return
        counters = [
            (side.counters, name, count)
            for group in stacks.groups
            for side in (group.left, group.right)
            if side.order >= _LARGE
            for name, count in side.counters.items()
        ]
        self.divides = True
        try:
            with link.together(
                "an update or a refresh has failed on rank {rank} of {ranks}; its error names the "
                "cause. The states of the ranks differ now: load the last checkpoint"
            ):
                yield
        finally:
            self.divides = False
        if not counters:
            return  # all rows are small
        added = link.sums([counts[name] - before for counts, name, before in counters])
        for (counts, name, before), total in zip(counters, added, strict=True):
            counts[name] = before + total
        streams = [
            [
                tensor[part.rows]
                for part in parts
                for name, tensor in part.factors.tensors.items()
                if wanted(name)
            ]
            for parts in _shares(due_parts(stacks.groups, due), link)
        ]
        self.received += gather(streams, link, stacks.workspace)

    def _same_gradients(
        self, link: Link, stacks: DeviceStacks, due: DueMembers, norms: Tensor
    ) -> bool:
        """True if all ranks have the same gradients. Raises an error if their work differs."""
        values = norms[: len(stacks.members)].cpu().numpy().tobytes()
        same_work, same_gradients = link.agree(_describe(stacks, due), values)
        if not same_work:
            raise RuntimeError(
                f"the {link.ranks} ranks disagree on which parameters are due at this step: their "
                "parameters, options or numbers of steps differ. Set process_group to the "
                "ranks that hold the same parameters, or to False"
            )
        if same_gradients:
            return True
        if self._given:
            raise RuntimeError(
                f"gradients differ between the {link.ranks} ranks of process_group: average them "
                "before the step, as DistributedDataParallel does, or set process_group=False"
            )
        if not self.apart:
            warn(
                f"gradients differ between the {link.ranks} ranks, so each rank does all of its "
                "updates and refreshes itself; if that is intended, set process_group=False"
            )
        self.apart += 1
        return False


def _shares(parts: Iterable[Part], link: Link) -> list[list[Part]]:
    """Divide the rows that are worth sending among the ranks."""
    return divide((part for part in parts if part.factors.order >= _LARGE), link.ranks)


def _describe(stacks: DeviceStacks, due: DueMembers) -> bytes:
    """Describe the work of a step: ranks with the same description do the same work."""
    matrices = [member.blocking.matrices for member in stacks.members]
    configs = list({id(blocks.config): blocks.config for blocks in due.values()}.values())
    turns = [(i, configs.index(due[i].config), sorted(due[i].turns or ())) for i in due]
    return repr((matrices, configs, turns, stacks.workspace)).encode()
