"""Products L̂ G R̂ by kernels, each parameter's in the cheapest way that is near enough."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.acceleration import has_kernels
from kronbit.gradients import GradientBlocks
from kronbit.groups import Group

if TYPE_CHECKING:
    from kronbit.addresses import AddressTable
    from kronbit.grouped import GroupedProducts
    from kronbit.nonfinite import Measured
    from kronbit.preconditioner import Preconditioner
    from kronbit.tables import TableBlock

# Ways to take products, by the bits of their operands: in float32 by torch, which is the contract;
# in sums of two bf16 numbers; in bf16. The diagonals of roots are float32 in all of them.
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
        ways: How each member's products are taken: in a way whose Ĝ was, at the member's last
            refresh, found within half a degree of the float32 one.
    """

    def __init__(self, preconditioner: Preconditioner, graphs: bool) -> None:
        self._weak, self._graphs = weakref.ref(preconditioner), graphs
        self.ways = dict.fromkeys(range(len(preconditioner.members)), FLOAT32)
        self._device = preconditioner.graft_ratio.device
        self._grouped: dict[tuple[int, frozenset[int]], GroupedProducts] = {}
        self._shares = _Shares.make(set(), self.ways)
        self._compared: AddressTable | None = None

    @property
    def _preconditioner(self) -> Preconditioner:
        """The owner. Held weakly: a cycle would keep all its memory until a collection."""
        owner = self._weak()
        assert owner is not None
        return owner

    def precondition(self, measured: Measured, zero_nonfinite: bool) -> Sequence[int]:
        """Write G̃ over those gradients that kernels can take.

        Args:
            measured: The members' gradients; others may follow.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.

        Returns:
            The refreshed members that are left over, in order; some may have no gradient.
        """
        refreshed = self._preconditioner.refreshed
        if measured.addresses is None:
            return sorted(refreshed)
        if not self._shares.hold(refreshed, self.ways):
            self._shares = _Shares.make(refreshed, self.ways)
        there = measured.addresses.values
        for way, members in self._shares.by_kernels:
            # Whoever has no gradient is passed over: the tables do not depend on who has one now.
            if any(map(there.__getitem__, members)):
                tables = self._tables(way, members)
                tables.precondition(measured.addresses, measured.norms, zero_nonfinite)
        if measured.kernel is not None:  # kernels can take all gradients
            return self._shares.left
        return [i for i in sorted(refreshed) if i in self._shares.left or not there[i]]

    def choose(
        self, grads: Sequence[Tensor | None], candidates: Collection[int], new: Collection[int]
    ) -> None:
        """Find out how products of refreshed members may be taken. Waits for the device.

        Args:
            grads: The members' gradients, on which it is tried.
            candidates: Members that have just been refreshed.
            new: Those that never were before. The others have a way, and take a cheaper one only
                if it is near by far: the tables of kernels are made anew at every change.
        """
        before = {i: BF16 if i in new else self.ways[i] for i in candidates}
        for i in candidates:
            self.ways[i] = FLOAT32
        if not has_kernels(self._device):
            return
        from kronbit.addresses import AddressTable, takable

        if self._compared is None:
            self._compared = AddressTable(len(grads), self._device)
        grads = takable(grads)
        self._compared.fill(grads)
        undecided = frozenset(i for i in candidates if i in self._preconditioner.refreshed)
        # What BF16X3 rounds off is hundreds of times less than what BF16 does: where the two
        # agree, both are right.
        near = _near(self._angles_to_bf16(undecided, grads), before, BF16)
        for i in near:
            self.ways[i] = BF16
        undecided -= near
        for i in _near(self._angles_to_float32(undecided, grads), before, BF16X3):
            self.ways[i] = BF16X3

    def graph_refused(self) -> str | None:
        """Why the ordinary step could not be captured as a graph; ``None`` if it could be."""
        refusals = (grouped.graph_refused for grouped in self._grouped.values())
        return next((reason for reason in refusals if reason), None)

    def _angles_to_bf16(
        self, members: frozenset[int], grads: Sequence[Tensor | None]
    ) -> dict[int, float]:
        """Cosines of the angles between Ĝ in BF16 and in BF16X3."""
        if not any(grads[i] is not None for i in members):
            return {}
        assert self._compared is not None
        return _cosines(self._tables(BF16X3, members).compare(self._compared), members)

    def _angles_to_float32(
        self, members: frozenset[int], grads: Sequence[Tensor | None]
    ) -> dict[int, float]:
        """Cosines of the angles between Ĝ in BF16X3 and in float32."""
        members = frozenset(i for i in members if grads[i] is not None)
        if not members:
            return {}
        own = self._preconditioner
        blocks = GradientBlocks(own.members, grads)
        sums = torch.zeros(len(grads), 3, dtype=torch.float32, device=self._device)

        def compare(seen: Sequence[tuple[TableBlock, Tensor]]) -> None:
            for group, rows, stack in _stretches(seen, own.workspace // _COMPARED):
                _, exact = own.product(blocks, group, rows)
                pairs = ((stack, exact), (stack, stack), (exact, exact))
                found = torch.stack([(a * b).sum((1, 2)) for a, b in pairs], dim=1)
                sums.index_add_(0, group.owner[rows], found)

        assert self._compared is not None
        self._tables(BF16X3, members).look(self._compared, compare)
        return _cosines(sums, members)

    def _tables(self, way: int, members: frozenset[int]) -> GroupedProducts:
        """The kernels' tables for some members. Recent ones are remembered."""
        grouped = self._grouped.pop((way, members), None)
        if grouped is None:
            from kronbit.grouped import GroupedProducts
            from kronbit.tables import Precision

            if len(self._grouped) == _REMEMBERED:
                self._grouped.pop(next(iter(self._grouped)))  # the one not used for longest
            precision = Precision(precise=way == BF16X3)
            grouped = GroupedProducts(self._preconditioner, members, precision, self._graphs)
        self._grouped[way, members] = grouped
        return grouped


@dataclass(frozen=True)
class _Shares:
    """Which refreshed members' products are taken how.

    Attributes:
        refreshed: The members.
        ways: How products of each are taken.
        by_kernels: Those of each way of the kernels, if there are any.
        left: The others, in order.
    """

    refreshed: set[int]
    ways: dict[int, int]
    by_kernels: tuple[tuple[int, frozenset[int]], ...]
    left: tuple[int, ...]

    @classmethod
    def make(cls, refreshed: set[int], ways: dict[int, int]) -> _Shares:
        by_way = {way: frozenset(i for i in refreshed if ways[i] == way) for way in _BY_KERNELS}
        return cls(
            refreshed=set(refreshed),
            ways=dict(ways),
            by_kernels=tuple((way, members) for way, members in by_way.items() if members),
            left=tuple(i for i in sorted(refreshed) if ways[i] not in _BY_KERNELS),
        )

    def hold(self, refreshed: set[int], ways: dict[int, int]) -> bool:
        """Whether nothing has changed."""
        return refreshed == self.refreshed and ways == self.ways


def _cosines(sums: Tensor, members: Collection[int]) -> dict[int, float]:
    """Of members, from ⟨a, b⟩, ⟨a, a⟩ and ⟨b, b⟩. Waits for the device."""
    cosines = (sums[:, 0] / (sums[:, 1].sqrt() * sums[:, 2].sqrt())).tolist()
    return {i: cosines[i] for i in members}


def _near(cosines: Mapping[int, float], before: Mapping[int, int], way: int) -> frozenset[int]:
    """Members that are near enough for a way: by half of the tolerance, if it is new to them."""
    most = {new: math.cos(math.radians(_TOLERANCE / (2 if new else 1))) for new in (False, True)}
    # False for NaN
    return frozenset(i for i, cosine in cosines.items() if cosine >= most[before[i] > way])


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
