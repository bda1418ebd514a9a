"""Products L̂ G R̂ by kernels, each parameter's in the cheapest way that is near enough."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.acceleration import has_kernels
from kronbit.gradients import GradientBlocks
from kronbit.groups import Group

if TYPE_CHECKING:
    from kronbit.grouped import GroupedProducts
    from kronbit.preconditioner import Preconditioner
    from kronbit.tables import TableBlock

# Ways to take products, by the bits of their operands: in float32 by torch, which is the contract;
# in sums of two bf16 numbers; in bf16.
FLOAT32, BF16X3, BF16 = 24, 16, 8
WAYS = (FLOAT32, BF16X3, BF16)
_BY_KERNELS = (BF16, BF16X3)  # the cheapest first

_TOLERANCE = 0.5  # degrees that Ĝ may be off
_REMEMBERED = 64
_COMPARED = 8  # the comparison takes one part in so many of the workspace


class KernelProducts:
    """Takes products by kernels, for members that have been found to bear it.

    Args:
        preconditioner: Whose members they are.
        graphs: Whether the ordinary step may be a CUDA graph.

    Attributes:
        ways: How each member's products are taken: the cheapest way whose Ĝ was, at the member's
            last refresh, within half a degree of the float32 one.
    """

    def __init__(self, preconditioner: Preconditioner, graphs: bool) -> None:
        self._weak, self._graphs = weakref.ref(preconditioner), graphs
        self.ways = dict.fromkeys(range(len(preconditioner.members)), FLOAT32)
        self._device = preconditioner.graft_ratio.device
        self._grouped: dict[tuple[int, frozenset[int]], GroupedProducts] = {}
        # Whose gradients are bf16: these are never mixed with others, which need more.
        self._half: dict[int, bool] = {}

    @property
    def _preconditioner(self) -> Preconditioner:
        """The owner. Held weakly: a cycle would keep all its memory until a collection."""
        owner = self._weak()
        assert owner is not None
        return owner

    def precondition(
        self, grads: Mapping[int, Tensor], norms: Tensor, zero_nonfinite: bool
    ) -> set[int]:
        """Write G̃ over those gradients that kernels can take; returns whose.

        Args:
            grads: Refreshed member -> gradient.
            norms: (members,): ‖G‖_F of each.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.
        """
        taken: set[int] = set()
        if not has_kernels(self._device):
            return taken
        for half, own in self._by_precision(grads).items():
            for way in _BY_KERNELS:
                there = {i: g for i, g in own.items() if self.ways[i] == way}
                if there:
                    # All of them, so that the tables do not depend on who has a gradient now.
                    members = frozenset(
                        i
                        for i in self._preconditioner.refreshed
                        if self.ways[i] == way and self._half.get(i) == half
                    )
                    self._tables(way, members).precondition(there, norms, zero_nonfinite)
                    taken |= there.keys()
        return taken

    def choose(self, grads: Sequence[Tensor | None], candidates: Collection[int]) -> None:
        """Find out how products of refreshed members may be taken. Waits for the device."""
        for i in candidates:
            self.ways[i] = FLOAT32
        if not has_kernels(self._device):
            return
        there = ((i, grads[i]) for i in candidates if i in self._preconditioner.refreshed)
        for undecided in self._by_precision({i: g for i, g in there if g is not None}).values():
            for way in _BY_KERNELS:
                for i in self._within_tolerance(way, undecided) if undecided else ():
                    self.ways[i] = way
                    del undecided[i]

    def graph_refused(self) -> str | None:
        """Why the ordinary step could not be captured as a graph; ``None`` if it could be."""
        refusals = (grouped.graph_refused for grouped in self._grouped.values())
        return next((reason for reason in refusals if reason), None)

    def _within_tolerance(self, way: int, grads: Mapping[int, Tensor]) -> list[int]:
        """Members whose Ĝ, taken in some way, is near enough to the float32 one."""
        own = self._preconditioner
        count = len(own.members)
        blocks = GradientBlocks(own.members, [grads.get(i) for i in range(count)])
        sums = torch.zeros(3, count, dtype=torch.float32, device=self._device)

        def compare(seen: Sequence[tuple[TableBlock, Tensor]]) -> None:
            for group, rows, stack in _stretches(seen, own.workspace // _COMPARED):
                _, exact = own.product(blocks, group, rows)
                pairs = ((stack, exact), (stack, stack), (exact, exact))
                found = torch.stack([(a * b).sum((1, 2)) for a, b in pairs])
                sums.index_add_(1, group.owner[rows], found)

        self._tables(way, frozenset(grads)).look(grads, compare)
        cosine = sums[0] / (sums[1].sqrt() * sums[2].sqrt())
        good = (cosine >= math.cos(math.radians(_TOLERANCE))).tolist()  # False for NaN
        return [i for i in grads if good[i]]

    def _by_precision(self, grads: Mapping[int, Tensor]) -> dict[bool, dict[int, Tensor]]:
        """Gradients that the kernels can read and write: those in bf16, and the others."""
        from kronbit.addresses import take

        plain = take(list(grads.values()))
        found: dict[bool, dict[int, Tensor]] = {}
        for i, grad in grads.items():
            if plain or take([grad]):
                half = self._half[i] = grad.dtype == torch.bfloat16
                found.setdefault(half, {})[i] = grad
        return found

    def _tables(self, way: int, members: frozenset[int]) -> GroupedProducts:
        """The kernels' tables for some members. Recent ones are remembered."""
        grouped = self._grouped.pop((way, members), None)
        if grouped is None:
            from kronbit.grouped import GroupedProducts

            if len(self._grouped) == _REMEMBERED:
                self._grouped.pop(next(iter(self._grouped)))  # the one not used for longest
            grouped = GroupedProducts(
                self._preconditioner, members, precise=way == BF16X3, graphs=self._graphs
            )
        self._grouped[way, members] = grouped
        return grouped


def _stretches(
    seen: Sequence[tuple[TableBlock, Tensor]], workspace: int
) -> Iterator[tuple[Group, slice, Tensor]]:
    """Blocks that are neighbours in their group, as one float32 stack, a few at a time."""
    stretch: list[Tensor] = []
    for i, (block, Ghat) in enumerate(seen):
        stretch.append(Ghat)
        following = seen[i + 1][0] if i + 1 < len(seen) else None
        # G, Ĝ twice, two roots and what lies between
        most = max(1, workspace // (4 * 8 * max(block.group.shape) ** 2))
        if (
            len(stretch) == most
            or following is None
            or following.group is not block.group
            or following.row != block.row + 1
        ):
            rows = slice(block.row + 1 - len(stretch), block.row + 1)
            yield block.group, rows, torch.stack(stretch).float()
            stretch = []
