"""What a preconditioner asks of the ranks that hold the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from kronbit.blocks.batches import Part
    from kronbit.blocks.groups import DeviceStacks, Due


class Exchange(Protocol):
    """Shares the work of updates and refreshes out among ranks."""

    @property
    def divides(self) -> bool:
        """Whether this rank does a part of the work, now."""

    def own(self, parts: Iterable[Part]) -> Iterable[Part]:
        """The rows that this rank does."""

    def shared(
        self,
        stacks: DeviceStacks,
        due: Mapping[int, Due],
        norms: Tensor,
        wanted: Callable[[str], bool],
    ) -> AbstractContextManager[None]:
        """Inside, ranks do their own rows; afterwards, every rank has all of them.

        Args:
            stacks: The state.
            due: Members that are due, with their options and blocks.
            norms: Of the members' gradients: they tell whether ranks hold the same state.
            wanted: Names of the tensors that are written.
        """


class Alone:
    """One rank, which does everything."""

    divides = False

    def own(self, parts: Iterable[Part]) -> Iterable[Part]:
        """All of them."""
        return parts

    def shared(
        self,
        stacks: DeviceStacks,
        due: Mapping[int, Due],
        norms: Tensor,
        wanted: Callable[[str], bool],
    ) -> AbstractContextManager[None]:
        """Nothing to be done."""
        return nullcontext()
