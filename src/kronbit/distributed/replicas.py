"""Ranks that hold the same state, as under DistributedDataParallel: each does a part of the work.

Results are gathered, so that every rank has the whole state again. All communication happens at
updates and refreshes; ordinary steps send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from kronbit.blocks.batches import Part, due_parts
from kronbit.distributed.assignment import divide
from kronbit.distributed.collectives import Link, gather
from kronbit.distributed.exchange import Exchange
from kronbit.messages import warn

if TYPE_CHECKING:
    from kronbit.blocks.groups import DeviceStacks, Due
    from kronbit.factors import Factors

_LARGE = 64  # smallest order that is worth sending


class Replicas(Exchange):
    """The ranks of a group, each of which holds the whole state.

    Args:
        link: The ranks.
        given: True if the user has stated that they hold the same parameters. Otherwise, ranks with
            different gradients are treated as independent trainings.

    Attributes:
        divides: True while the work is divided among the ranks.
        apart: How often each rank did all of the work, because gradients differed.
        received: Bytes that this rank has received from others.
    """

    def __init__(self, link: Link, given: bool) -> None:
        self.link, self._given = link, given
        self.divides = False
        self.apart = 0
        self.received = 0

    def assigned(self, parts: Iterable[Part]) -> Iterable[Part]:
        """Return the rows that this rank computes: its share, or all."""
        if not self.divides:
            return parts
        parts = list(parts)
        small = [part for part in parts if not _worth_sending(part.factors)]
        return [*self._divided(parts)[self.link.rank], *small]

    def _divided(self, parts: Iterable[Part]) -> list[list[Part]]:
        """Divide the rows that are worth sending among the ranks."""
        large = [part for part in parts if _worth_sending(part.factors)]
        return divide(large, self.link.ranks)

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
            RuntimeError: If ranks disagree on the work, before anything is changed; or if one of
                them has failed.
        """
        if not self._same_gradients(stacks, due, norms):
            self.apart += 1
            yield
            return
        counters = [
            (side, name, count)
            for group in stacks.groups
            for side in (group.left, group.right)
            if _worth_sending(side)
            for name, count in side.counters.items()
        ]
        failure: Exception | None = None
        self.divides = True
        try:
            yield
        except Exception as error:  # the others wait for this rank and must be told
            failure = error
        finally:
            self.divides = False
        self._add_up(counters, failure)
        streams = [
            [
                tensor[part.rows]
                for part in parts
                for name, tensor in part.factors.tensors.items()
                if wanted(name)
            ]
            for parts in self._divided(due_parts(stacks.groups, due))
        ]
        self.received += gather(streams, self.link, stacks.workspace)

    def _same_gradients(self, stacks: DeviceStacks, due: Mapping[int, Due], norms: Tensor) -> bool:
        """True if all ranks have the same gradients. Raise an error if their work differs."""
        ranks = self.link.ranks
        values = norms[: len(stacks.members)].cpu().numpy().tobytes()
        digests = self.link.digests(_describe(stacks, due), values)
        works, gradients = map(set, zip(*digests, strict=True))
        if len(works) > 1:
            raise RuntimeError(
                f"the {ranks} ranks disagree on which parameters are due at this step: their "
                "parameters, options or numbers of steps differ. Set process_group to the "
                "ranks that hold the same parameters, or to False"
            )
        if len(gradients) > 1 and self._given:
            raise RuntimeError(
                f"gradients differ between the {ranks} ranks of process_group: average them "
                "before the step, as DistributedDataParallel does, or set process_group=False"
            )
        if len(gradients) > 1 and not self.apart:
            warn(
                f"gradients differ between the {ranks} ranks, so each of them does all of its "
                "updates and refreshes; if that is intended, set process_group=False"
            )
        return len(gradients) == 1

    def _add_up(
        self, counters: Sequence[tuple[Factors, str, int]], failure: Exception | None
    ) -> None:
        """Add the counts of all ranks to the counters; raise an error if a rank has failed.

        Args:
            counters: Counters by their factors and name, with their values before this step.
            failure: The error of this rank.
        """
        added = [side.counters[name] - before for side, name, before in counters]
        rank, ranks = self.link.rank, self.link.ranks
        flags = [int(failure is not None and other == rank) for other in range(ranks)]
        sums = self.link.sums([*added, *flags])
        if failure is not None:
            raise failure
        failed = sums[len(added) :]
        if any(failed):
            raise RuntimeError(
                f"an update or a refresh has failed on rank {failed.index(1)} of {ranks}; its "
                "error names the cause. The states of the ranks differ now: load the last "
                "checkpoint"
            )
        for (side, name, before), total in zip(counters, sums, strict=False):
            side.counters[name] = before + total


def _describe(stacks: DeviceStacks, due: Mapping[int, Due]) -> bytes:
    """Describe the work of a step: ranks with the same description do the same work."""
    matrices = [member.blocking.matrices for member in stacks.members]
    configs = list({id(blocks.config): blocks.config for blocks in due.values()}.values())
    numbers = {id(config): number for number, config in enumerate(configs)}
    turns = [
        (i, numbers[id(blocks.config)], sorted(blocks.turns or ())) for i, blocks in due.items()
    ]
    return repr((matrices, configs, turns, stacks.workspace)).encode()


def _worth_sending(factors: Factors) -> bool:
    """True if rows are large enough to divide: computing small rows is faster than receiving."""
    return factors.order >= _LARGE
