"""State on one rank each: the owner of a parameter preconditions its whole gradient.

Either parameters are sharded (FSDP2, HSDP): owners get the rows of their gradients from all ranks,
and send them back preconditioned, by one uneven all-to-all each way. Or every rank has all
gradients (``shard_state=True``): owners precondition theirs, and all ranks get them.

Owners do what a single process does, on the same numbers: so the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocks.blocking import Blocking
from kronbit.blocks.gradients import plain_dtypes
from kronbit.distributed.assignment import assign
from kronbit.distributed.collectives import digest, exchange, gather
from kronbit.distributed.sharding import Placement, local_gradients, placement_of, rows_on

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kronbit.blocks.gradients import StepGradients


def cost(blocking: Blocking) -> int:
    """Of the factors of a parameter: the cubes of their orders."""
    return sum(len(grid) * sum(n**3 for n in grid.shape) for grid in blocking.grids)


class Owners:
    """Who owns which parameter.

    Args:
        group: The ranks among which parameters are shared out.
        device: Where bytes travel.
        workspace: Bound of transient memory in bytes.
        placement: Of sharded parameters; ``None``: every rank has all of them.
        spreads: Whether a gradient that is not finite in a part becomes so on all ranks.

    Attributes:
        bytes: Of gradients that this rank has sent or, where all ranks get all, received.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        workspace: int,
        placement: Placement | None = None,
        spreads: bool = True,
    ) -> None:
        self._placement, self._spreads = placement, spreads
        self.group, self._device, self._workspace = group, device, workspace
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._owners: dict[Tensor, int] = {}
        self.bytes = 0

    def share_out(self, params: Sequence[tuple[Tensor, Blocking]]) -> None:
        """Find owners of preconditioned parameters, all at once: their costs are balanced."""
        for trained in (True, False):  # frozen ones cost nothing
            own = [(p, cost(blocking)) for p, blocking in params if p.requires_grad == trained]
            found = assign([price for _, price in own], self.ranks)
            self._owners |= {p: owner for (p, _), owner in zip(own, found, strict=True)}

    def keep(self, before: Owners) -> None:
        """Leave parameters to those who owned them."""
        self._owners |= before._owners

    def owner(self, p: Tensor) -> int | None:
        """The rank that owns a parameter, within the group; ``None``: every rank has its state."""
        return self._owners.get(p)

    def owns(self, p: Tensor) -> bool:
        """Whether its state is here."""
        return self._owners.get(p, self.rank) == self.rank

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank. Waits for the others."""
        found = torch.tensor([int(flag)], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found.item())

    def sent_to_first(self, values: Any, owner: int) -> Any:
        """What an owner has, on the first rank; nothing on all others. Waits for both."""
        if owner == 0 or self.rank not in (0, owner):
            return values if self.rank == owner == 0 else {}
        box = [values]
        first, last = (dist.get_global_rank(self.group, rank) for rank in (0, owner))
        if self.rank == owner:
            dist.send_object_list(box, first, group=self.group, device=self._device)
            return {}
        dist.recv_object_list(box, last, group=self.group, device=self._device)
        return box[0]

    @contextmanager
    def whole(self, present: StepGradients, careful: bool) -> Iterator[StepGradients]:
        """Show whole gradients where they are owned, and nothing of those that others own.

        Afterwards, what stands there is in the gradients, wherever their parts are.

        Args:
            present: The step's gradients.
            careful: Whether ranks make sure that all of them have the same gradients, and that none
                has failed. Waits for the others.

        Raises:
            RuntimeError: If they have not, or one has.
        """
        if careful:
            self._compare(present)
        grads = local_gradients(present)
        plain = [grad.contiguous() for grad in grads]
        of_all = self._placement is None
        sharded = [not of_all and placement_of(p) == self._placement for p in present.params]
        shown = list(plain)
        parts: list[list[list[Tensor]]] = [[[] for _ in range(self.ranks)] for _ in range(2)]
        theirs, mine = parts  # what others own of mine; what is mine of others
        copies: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for i, p in enumerate(present.params):
            owner = self._owners.get(p)
            if owner is None:
                continue
            if not sharded[i]:
                copies[owner].append(plain[i])
            else:
                theirs[owner].append(plain[i])
                if owner == self.rank:
                    shown[i] = plain[i].new_empty(p.shape)
                    for rank in range(self.ranks):
                        rows = rows_on(rank, self.ranks, p.shape[0])
                        mine[rank].append(shown[i][rows])
            if owner != self.rank:
                shown[i] = plain[i].new_empty(0)
        rest = [
            plain[i] for i, p in enumerate(present.params) if sharded[i] and p not in self._owners
        ]
        if self._spreads:
            self._poison(rest)
        if any(sharded):
            self.bytes += exchange(theirs, mine, self.group, self._device)
        with self.together() if careful else nullcontext():
            yield present._replace(grads=shown, dtypes=plain_dtypes(shown))
        if any(sharded):
            self.bytes += exchange(mine, theirs, self.group, self._device)
        if any(copies):
            self.bytes += gather(copies, self.group, self._device, self._workspace)
        written = [(own, copy) for own, copy in zip(grads, plain, strict=True) if own is not copy]
        if written:
            torch._foreach_copy_([own for own, _ in written], [copy for _, copy in written])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all ranks know if one of them fails inside. Waits for the others.

        Raises:
            RuntimeError: On ranks that have not failed, if another one has.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self.any_rank(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError(
                f"another one of the {self.ranks} ranks has failed, and says why; states of ranks "
                "may differ now: load the last checkpoint"
            )

    def _compare(self, present: StepGradients) -> None:
        """Make sure that all ranks have gradients of the same parameters."""
        named = repr([(self._owners.get(p), tuple(p.shape)) for p in present.params])
        mine = torch.tensor([digest(named.encode())], device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(found, mine, group=self.group)
        if len({int(own) for own in found}) > 1:
            raise RuntimeError(
                f"the {self.ranks} ranks have gradients of different parameters: give all ranks "
                "all of them, zero where a rank has none"
            )

    def _poison(self, grads: Sequence[Tensor]) -> None:
        """Where a part of a gradient is not finite, the whole is not: make that so on all ranks."""
        grads = [grad for grad in grads if grad.is_floating_point()]
        if not grads:
            return
        sizes = [grad.abs().amax() if grad.numel() else grad.new_zeros(()) for grad in grads]
        good = torch.stack([torch.isfinite(size) for size in sizes]).to(self._device, torch.int32)
        dist.all_reduce(good, dist.ReduceOp.MIN, group=self.group)
        factors = torch.where(good.bool(), 1.0, torch.nan).to(grads[0].device)
        for grad, factor in zip(grads, factors.unbind(), strict=True):
            grad.mul_(factor)
