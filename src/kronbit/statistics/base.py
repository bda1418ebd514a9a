"""What an optimizer asks of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from kronbit.batches import Part
    from kronbit.blocking import Blocking
    from kronbit.config import Config
    from kronbit.groups import Due
    from kronbit.work import Itinerary, Work


class Source(NamedTuple):
    """M of those members that have one.

    Attributes:
        due: The members, with their options and blocks.
        of: M of a batch of rows, float32 (k, n, n), to be written to; zero beyond a row's order.
            May be called again for rows that failed.
    """

    due: Mapping[int, Due]
    of: Callable[[Sequence[Part]], Tensor]


class Statistics(Protocol):
    """Which matrices there are, and what their statistics are made of."""

    # What checkpoints call them.
    name: str
    # Whether gradients may be put together of rows that are on several ranks.
    takes_shards: bool

    def adopt(self, params: Collection[Tensor]) -> None:
        """Learn which parameters are optimized and may be preconditioned."""

    def route(self, p: Tensor, config: Config) -> Blocking | str:
        """How a parameter is cut, or why it is left to the base optimizer."""

    def matrices(
        self, itinerary: Itinerary, grads: list[Tensor]
    ) -> AbstractContextManager[list[Tensor]]:
        """The gradients as they are preconditioned; what stands there in the end is written back.

        Args:
            itinerary: The parameters of the step.
            grads: Their gradients, one each.
        """

    def source(self, work: Work, due: Mapping[int, Due]) -> Source:
        """What an update takes.

        Args:
            work: The step's.
            due: Members to update, with their options and blocks.
        """

    @property
    def collects(self) -> bool:
        """Whether something must be collected before the step at which it is needed."""

    def expect(self, params: Iterable[Tensor]) -> None:
        """Say whose statistics the next step will need; what was collected is dropped."""

    def counts(self) -> dict[str, int]:
        """What went wrong how often, for ``diagnostics``."""
