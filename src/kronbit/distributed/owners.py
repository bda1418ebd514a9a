"""Owners: one rank holds the state of a parameter, and preconditions its whole gradient.

If parameters are sharded (FSDP2, HSDP), owners receive the rows of their gradients from all ranks
and send the preconditioned rows back, by one uneven all-to-all each way. If every rank has all
gradients (``shard_state=True``), owners send preconditioned gradients to all ranks.

Owners compute on the same numbers as a single process, so the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocks.blocking import Blocking
from kronbit.blocks.gradients import plain_dtypes
from kronbit.config import Config
from kronbit.distributed.assignment import assign
from kronbit.distributed.collectives import Link, Streams, copy_all, exchange, gather
from kronbit.distributed.sharding import Placement, local_gradients, placement_of

if TYPE_CHECKING:
    from kronbit.blocks.gradients import StepGradients


def cost(blocking: Blocking) -> int:
    """Return the cost of a parameter's factors: the sum of the cubes of their orders."""
    return sum(len(grid) * sum(n**3 for n in grid.shape) for grid in blocking.grids)


class Owners:
    """The ranks that own parameters.

    Args:
        link: The ranks among which parameters are divided.
        config: The optimizer's options.
        placement: Placement of sharded parameters; None if every rank has all parameters.

    Attributes:
        owner_of: Parameter -> the rank that owns it. Every rank has the state of parameters
            without an owner.
        bytes: Bytes of gradients that this rank has sent or, if every rank receives all gradients,
            received.
    """

    def __init__(self, link: Link, config: Config, placement: Placement | None = None) -> None:
        self.link, self._config, self._placement = link, config, placement
        self.owner_of: dict[Tensor, int] = {}
        self.bytes = 0

    def choose(self, blockings: Mapping[Tensor, Blocking]) -> None:
        """Choose the owners of all preconditioned parameters at once, to balance their costs."""
        for trained in (True, False):  # frozen parameters cost nothing
            costs = {p: cost(cut) for p, cut in blockings.items() if p.requires_grad == trained}
            owners = assign(list(costs.values()), self.link.ranks)
            self.owner_of |= dict(zip(costs, owners, strict=True))

    def owns(self, p: Tensor) -> bool:
        """True if this rank has the state of a parameter."""
        return self.owner_of.get(p, self.link.rank) == self.link.rank

    @contextmanager
    def whole(self, gradients: StepGradients, careful: bool) -> Iterator[StepGradients]:
        """Provide whole gradients to their owners; at the end, write them back on all ranks.

        If ``careful``, verify that all ranks have gradients of the same parameters, and that no
        rank fails inside.
        """
        if careful:
            self._compare(gradients)
        grads, placement = local_gradients(gradients), self._placement
        plain = [grad.contiguous() for grad in grads]
        sharded = [placement is not None and placement_of(p) == placement for p in gradients.params]
        if self._config.nonfinite != "raise":
            rows = compress(zip(gradients.params, plain, strict=True), sharded)
            self._spread_nonfinite([grad for p, grad in rows if p not in self.owner_of])
        assembled, to_owners, from_ranks, replicated = self._sort(gradients.params, plain, sharded)
        if any(sharded):
            self.bytes += exchange(to_owners, from_ranks, self.link)
        with self.together() if careful else nullcontext():
            yield gradients._replace(grads=assembled, dtypes=plain_dtypes(assembled))
        if any(sharded):
            self.bytes += exchange(from_ranks, to_owners, self.link)
        if any(replicated):
            self.bytes += gather(replicated, self.link, int(self._config.workspace_mb * 2**20))
        copy_all((to, copy) for to, copy in zip(grads, plain, strict=True) if to is not copy)

    def _sort(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], sharded: Sequence[bool]
    ) -> tuple[list[Tensor], Streams, Streams, Streams]:
        """Sort gradients by owner; allocate the whole gradients that this rank owns.

        Returns:
            assembled: The gradients, whole if this rank owns them, empty if another rank does.
            to_owners: For each owner, this rank's rows of its gradients.
            from_ranks: For each rank, its rows of the gradients that this rank owns, as views.
            replicated: For each owner, those of its gradients that every rank has.
        """
        assembled = list(grads)
        streams: list[Streams] = [[[] for _ in range(self.link.ranks)] for _ in range(3)]
        to_owners, from_ranks, replicated = streams
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            owner = self.owner_of.get(p)
            if owner is None:
                continue
            (to_owners if sharded[i] else replicated)[owner].append(grad)
            if owner != self.link.rank:
                assembled[i] = grad.new_empty(0)
            elif sharded[i]:
                assembled[i] = grad.new_empty(p.shape)
                # The last ranks may have no rows. Shard(0) divides rows as chunk does.
                chunks = assembled[i].chunk(self.link.ranks)
                for rows, chunk in zip(from_ranks, chunks, strict=False):
                    rows.append(chunk)
        return assembled, to_owners, from_ranks, replicated

    def together(self) -> AbstractContextManager[None]:
        """Raise an error on all ranks if one of them fails inside; see ``Link.together``."""
        return self.link.together(
            "another of the {ranks} ranks has failed; its error names the cause. The states of the "
            "ranks may differ now: load the last checkpoint"
        )

    def _compare(self, gradients: StepGradients) -> None:
        """Verify that all ranks have gradients of the same parameters."""
        described = repr([(self.owner_of.get(p), tuple(p.shape)) for p in gradients.params])
        if not all(self.link.agree(described.encode())):
            raise RuntimeError(
                f"the {self.link.ranks} ranks have gradients of different parameters: every rank "
                "needs a gradient of every parameter; set missing gradients to zeros"
            )

    def _spread_nonfinite(self, grads: Sequence[Tensor]) -> None:
        """Make a gradient NaN on all ranks if it is non-finite on at least one."""
        grads = [grad for grad in grads if grad.is_floating_point()]
        if not grads:
            return
        sizes = [grad.abs().amax() if grad.numel() else grad.new_zeros(()) for grad in grads]
        finite = torch.stack([torch.isfinite(size) for size in sizes])
        finite = finite.to(self.link.device, torch.int32)
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=self.link.group)
        factors = torch.where(finite.bool(), 1.0, torch.nan).to(grads[0].device)
        for grad, factor in zip(grads, factors.unbind(), strict=True):
            grad.mul_(factor)
