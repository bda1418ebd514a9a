"""Owners: one rank holds the state of a parameter, and preconditions its whole gradient.

If parameters are sharded (FSDP2, HSDP), owners receive the rows of their gradients from all ranks,
and send them back preconditioned, by one uneven all-to-all each way. If every rank has all
gradients (``shard_state=True``), owners send the preconditioned ones to all ranks.

Owners do what a single process does, on the same numbers, so the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocks.blocking import Blocking
from kronbit.blocks.gradients import plain_dtypes
from kronbit.distributed.assignment import assign
from kronbit.distributed.collectives import Link, copy_all, exchange, gather
from kronbit.distributed.sharding import Placement, local_gradients, placement_of, rows_on

if TYPE_CHECKING:
    from kronbit.blocks.gradients import StepGradients


def cost(blocking: Blocking) -> int:
    """Return the cost of a parameter's factors: the sum of the cubes of their orders."""
    return sum(len(grid) * sum(n**3 for n in grid.shape) for grid in blocking.grids)


@dataclass(frozen=True)
class Transfer:
    """The gradients of a step, on their way to owners and back.

    Attributes:
        shown: The gradients that this rank preconditions. Gradients that another rank owns are
            empty.
        to_owners: For each owner, the rows of its gradients that this rank has.
        from_ranks: For each rank, the rows that it has of the gradients that this rank owns. Views
            of ``shown``.
        replicated: For each owner, the gradients it owns that every rank has.
    """

    shown: list[Tensor]
    to_owners: list[list[Tensor]]
    from_ranks: list[list[Tensor]]
    replicated: list[list[Tensor]]


class Owners:
    """The ranks that own parameters.

    Args:
        link: The ranks among which parameters are divided.
        workspace: Limit on transient memory in bytes.
        placement: Placement of sharded parameters; None if every rank has all parameters.
        spreads: True if a gradient that is not finite on one rank is made NaN on all ranks.

    Attributes:
        bytes: Bytes of gradients that this rank has sent or, if every rank receives all gradients,
            received.
    """

    def __init__(
        self,
        link: Link,
        workspace: int,
        placement: Placement | None = None,
        spreads: bool = True,
    ) -> None:
        self.link, self._workspace = link, workspace
        self._placement, self._spreads = placement, spreads
        self._owners: dict[Tensor, int] = {}
        self.bytes = 0

    def choose(self, params: Sequence[tuple[Tensor, Blocking]]) -> None:
        """Choose the owners of all preconditioned parameters at once, to balance their costs."""
        for trained in (True, False):  # frozen parameters cost nothing
            costs = {p: cost(blocking) for p, blocking in params if p.requires_grad == trained}
            owners = assign(list(costs.values()), self.link.ranks)
            self._owners |= dict(zip(costs, owners, strict=True))

    def keep(self, before: Owners) -> None:
        """Keep the owners that parameters had before."""
        self._owners |= before._owners

    def owner(self, p: Tensor) -> int | None:
        """Return the rank that owns a parameter, or None if every rank has its state."""
        return self._owners.get(p)

    def owns(self, p: Tensor) -> bool:
        """True if this rank has the state of a parameter."""
        return self._owners.get(p, self.link.rank) == self.link.rank

    @contextmanager
    def whole(self, gradients: StepGradients, careful: bool) -> Iterator[StepGradients]:
        """Provide whole gradients to their owners; at the end, write them back on all ranks.

        Args:
            gradients: The parameters of the step, with their gradients.
            careful: True to verify that all ranks have the same gradients, and that none fails
                inside. Waits for the others.

        Raises:
            RuntimeError: If ranks have different gradients, or one of them fails.
        """
        if careful:
            self._compare(gradients)
        grads = local_gradients(gradients)
        plain = [grad.contiguous() for grad in grads]
        sharded = [self._is_sharded(p) for p in gradients.params]
        if self._spreads:
            rows = compress(zip(gradients.params, plain, strict=True), sharded)
            self._spread_nonfinite([grad for p, grad in rows if p not in self._owners])
        transfer = self._transfer(gradients.params, plain, sharded)
        to_owners, from_ranks = transfer.to_owners, transfer.from_ranks
        if any(sharded):
            self.bytes += exchange(to_owners, from_ranks, self.link)
        with self.together() if careful else nullcontext():
            yield gradients._replace(grads=transfer.shown, dtypes=plain_dtypes(transfer.shown))
        if any(sharded):
            self.bytes += exchange(from_ranks, to_owners, self.link)
        if any(transfer.replicated):
            self.bytes += gather(transfer.replicated, self.link, self._workspace)
        copy_all((to, copy) for to, copy in zip(grads, plain, strict=True) if to is not copy)

    def _is_sharded(self, p: Tensor) -> bool:
        return self._placement is not None and placement_of(p) == self._placement

    def _transfer(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], sharded: Sequence[bool]
    ) -> Transfer:
        """Sort gradients by owner; allocate the whole gradients that this rank owns."""
        rank, ranks = self.link.rank, self.link.ranks
        transfer = Transfer(list(grads), *(_for_each(ranks) for _ in range(3)))
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            owner = self._owners.get(p)
            if owner is None:
                continue
            (transfer.to_owners if sharded[i] else transfer.replicated)[owner].append(grad)
            if owner != rank:
                transfer.shown[i] = grad.new_empty(0)
            elif sharded[i]:
                whole = transfer.shown[i] = grad.new_empty(p.shape)
                for other, rows in enumerate(transfer.from_ranks):
                    rows.append(whole[rows_on(other, ranks, p.shape[0])])
        return transfer

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error on all ranks if one of them fails inside. Waits for the others.

        Raises:
            RuntimeError: On ranks that have not failed, if another one has.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self.link.any_rank(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError(
                f"another of the {self.link.ranks} ranks has failed; its error names the cause. "
                "The states of the ranks may differ now: load the last checkpoint"
            )

    def _compare(self, gradients: StepGradients) -> None:
        """Verify that all ranks have gradients of the same parameters."""
        described = repr([(self._owners.get(p), tuple(p.shape)) for p in gradients.params])
        digests = self.link.digests(described.encode())
        if any(digest != digests[0] for digest in digests):
            raise RuntimeError(
                f"the {self.link.ranks} ranks have gradients of different parameters: every rank "
                "needs a gradient of every parameter; set it to zeros if there is none"
            )

    def _spread_nonfinite(self, grads: Sequence[Tensor]) -> None:
        """Make a gradient NaN on all ranks if it is not finite on one of them."""
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


def _for_each(ranks: int) -> list[list[Tensor]]:
    return [[] for _ in range(ranks)]
