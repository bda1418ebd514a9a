"""The interface between a preconditioner and the ranks that hold the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kronbit.blocks.batches import Part
    from kronbit.blocks.groups import DeviceStacks, Due


class Exchange:
    """A single rank, which does all of the work. ``Replicas`` divides it among ranks.

    Attributes:
        divides: True while this rank does only a part of the work.
    """

    divides = False

    def assigned(self, parts: Iterable[Part]) -> Iterable[Part]:
        """Return the rows that this rank computes."""
        return parts

    def shared(
        self,
        stacks: DeviceStacks,
        due: Mapping[int, Due],
        norms: Tensor,
        wanted: Callable[[str], bool],
    ) -> AbstractContextManager[None]:
        """Let each rank compute its share of the rows inside; at the end, all ranks have all rows.

        Args:
            stacks: The state.
            due: Members that are due, with their options and blocks.
            norms: Norms of the members' gradients. Ranks with different norms do not hold the same
                state.
            wanted: Returns True for the name of a tensor that is written.
        """
        return nullcontext()
