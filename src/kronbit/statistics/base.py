"""The interface between an optimizer and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.batches import Part, order_of

if TYPE_CHECKING:
    from kronbit.blocks.blocking import Blocking
    from kronbit.blocks.groups import DeviceStacks, DueMembers
    from kronbit.config import Config
    from kronbit.gpu.measured import Measured


# Returns M of a batch of rows: float32 (k, n, n), zero beyond the order of a row. The caller may
# write to it. May be called again for rows that failed.
MatrixOf: TypeAlias = "Callable[[Sequence[Part]], Tensor]"
# Returns the parameter of a member.
ParamOf: TypeAlias = "Callable[[int], Tensor]"


class Statistics:
    """Defines the matrices of each parameter, and the M of each update.

    Attributes:
        name: Name of the statistics in checkpoints.
        takes_shards: True if gradients may be assembled from rows on several ranks.
        collects: True if data must be collected before the step. Only then are ``matrices`` and
            ``expect`` called.
    """

    name: str
    takes_shards: bool
    collects: bool = False

    def adopt(self, params: Collection[Tensor]) -> None:
        """Register the parameters that are optimized and may be preconditioned."""

    def route(self, p: Tensor, config: Config) -> Blocking | str:
        """Return how a parameter is cut, or why it is left to the base optimizer."""
        raise NotImplementedError

    def matrices(
        self, params: Sequence[Tensor], planned: Container[Tensor], grads: list[Tensor]
    ) -> AbstractContextManager[list[Tensor]]:
        """Provide the gradients of matrices; at the end, write them back to the gradients.

        ``planned`` are the parameters that are preconditioned.
        """
        return nullcontext(grads)

    def source(
        self, stacks: DeviceStacks, measured: Measured, due: DueMembers, param: ParamOf
    ) -> tuple[DueMembers, MatrixOf]:
        """Return the members that can be updated, with options and blocks, and the function for M.

        Args:
            stacks: State of the device's members.
            measured: Gradients of the members.
            due: Members to update, with their options and blocks.
            param: Returns the parameter of a member.
        """
        raise NotImplementedError

    def expect(self, params: Iterable[Tensor]) -> None:
        """Drop collected data; collect for these parameters, due for an update at the next step."""

    def counts(self) -> dict[str, int]:
        """Return counters of failures, for ``diagnostics``."""
        return {}


def zeros_for(parts: Sequence[Part], device: torch.device) -> Tensor:
    """Allocate M of a batch, with zeros."""
    n, rows = order_of(parts), sum(part.rows.stop - part.rows.start for part in parts)
    return torch.zeros(rows, n, n, dtype=torch.float32, device=device)


def rows_in_batch(parts: Iterable[Part]) -> Iterator[tuple[Part, slice]]:
    """Yield the parts of a batch, each with its rows in the batch."""
    start = 0
    for part in parts:
        stop = start + part.rows.stop - part.rows.start
        yield part, slice(start, stop)
        start = stop
