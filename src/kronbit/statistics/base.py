"""What an optimizer asks of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from kronbit.blocks.batches import Part
    from kronbit.blocks.blocking import Blocking
    from kronbit.blocks.groups import DeviceStacks, Due
    from kronbit.config import Config
    from kronbit.gpu.norms import Measured


class DevicePart(Protocol):
    """The part of a step that one device does."""

    @property
    def stacks(self) -> DeviceStacks:
        """The state of the device's members."""

    @property
    def measured(self) -> Measured:
        """The members' gradients."""

    def param(self, member: int) -> Tensor:
        """The parameter of a member that has a gradient."""


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
        self, params: Sequence[Tensor], planned: Container[Tensor], grads: list[Tensor]
    ) -> AbstractContextManager[list[Tensor]]:
        """The gradients as they are preconditioned; what stands there in the end is written back.

        Args:
            params: The parameters of the step.
            planned: Those that are preconditioned.
            grads: Their gradients, one each.
        """

    def source(self, part: DevicePart, due: Mapping[int, Due]) -> Source:
        """What an update takes.

        Args:
            part: The device's part of the step.
            due: Members to update, with their options and blocks.
        """

    @property
    def collects(self) -> bool:
        """Whether something must be collected before the step at which it is needed."""

    def expect(self, params: Iterable[Tensor]) -> None:
        """Say whose statistics the next step will need; what was collected is dropped."""

    def counts(self) -> dict[str, int]:
        """What went wrong how often, for ``diagnostics``."""
