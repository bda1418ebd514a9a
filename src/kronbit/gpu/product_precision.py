"""Products L̂ G R̂ by kernels, each parameter's in the cheapest way that is near enough."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.groups import DeviceStacks
from kronbit.kernels.cache import BoundedCache
from kronbit.kernels.graphs import Replay

if TYPE_CHECKING:
    from kronbit.gpu.addresses import AddressTable
    from kronbit.gpu.norms import Measured
    from kronbit.gpu.ordinary_step import GroupedProducts
    from kronbit.gpu.tables import Precision

    _Key: TypeAlias = tuple[Precision, frozenset[int], frozenset[int]]

# Ways to take products, by the bits of their operands: in float32 by torch, which is the contract;
# in sums of two bf16 numbers; in float16, but a gradient in bf16 stays so.
FLOAT32, BF16X3, HALF = 24, 16, 11
WAYS = (FLOAT32, BF16X3, HALF)
_BY_KERNELS = (HALF, BF16X3)  # the cheapest first

# Degrees between Ĝ in HALF and in BF16X3 up to which a way is taken. BF16X3 has five bits more, so
# it errs by a 32nd of what lies between them: at half a degree HALF does, at 16 BF16X3.
_TOLERANCE = {HALF: 0.5, BF16X3: 16.0}
_REMEMBERED = 64


class KernelProducts:
    """Takes products by kernels, for members that have been found to bear it.

    Args:
        stacks: The members' state.
        graphs: Whether the ordinary step may be a CUDA graph.

    Attributes:
        ways: How each member's products are taken: in a way whose Ĝ was, by what was measured at
            the member's last refresh, within half a degree of the float32 one.
    """

    def __init__(self, stacks: DeviceStacks, graphs: bool) -> None:
        self._stacks = stacks
        self.ways = dict.fromkeys(range(len(stacks.members)), FLOAT32)
        # By precision, members, and who of them is in channels-last order.
        self._grouped: BoundedCache[_Key, GroupedProducts] = BoundedCache(
            _REMEMBERED,
            keep_used=True,
            on_eviction=lambda: self._replay.forget(),  # graphs may hold its tables
        )
        # By whose ways are compared: staggered, the same members come back every interval.
        self._comparisons: BoundedCache[_Key, GroupedProducts] = BoundedCache(_REMEMBERED)
        self._shares = _Shares.make(set(), self.ways)
        # The step by who takes part in which way and by what all gradients have in common; with one
        # table of addresses.
        self._replay = Replay(stacks.device, graphs)
        self._addresses: Tensor | None = None
        # The tables of the last step, by its members and ways and by what gradients have in common.
        self._last: tuple[Any, list[GroupedProducts]] = (None, [])

    def precondition(self, measured: Measured, addresses: AddressTable) -> Sequence[int]:
        """Write G̃ over those gradients that kernels can take.

        Args:
            measured: The members' gradients; others may follow.
            addresses: Where those are that the kernels can take.

        Returns:
            The refreshed members that are left over, in order; some may have no gradient.
        """
        refreshed = self._stacks.refreshed
        if not self._shares.hold(refreshed, self.ways):
            self._shares = _Shares.make(refreshed, self.ways)
        there = addresses.values
        # Whoever has no gradient is passed over: the tables do not depend on who has one now.
        chosen = tuple(
            (way, members)
            for way, members in self._shares.by_kernels
            if any(map(there.__getitem__, members))
        )
        if chosen:
            self.step(chosen, addresses, measured.norms)
        if measured.by_kernels:
            return self._shares.left
        return [i for i in sorted(refreshed) if i in self._shares.left or not there[i]]

    def step(
        self,
        chosen: tuple[tuple[int, frozenset[int]], ...],
        addresses: AddressTable,
        norms: Tensor,
    ) -> None:
        """Write G̃ over some gradients.

        Args:
            chosen: Ways, and the members whose products are taken so.
            addresses: Where the gradients are.
            norms: ‖G‖_F of each. If that is not finite, the gradient stays as it is.
        """
        kind = addresses.aligned, addresses.brain, addresses.channels_last
        if (chosen, kind) != self._last[0]:
            keys = [
                (self._precision(way, addresses), own, own & addresses.channels_last)
                for way, own in chosen
            ]
            found = [self._tables(key) for key in keys]
            self._last = (chosen, kind), found
        tables = self._last[1]
        # One piece of memory: to ask for two takes the host twice as long.
        scratch = max(own.scratch_bytes for own in tables)
        held = max(own.held_bytes for own in tables)
        room = torch.empty(scratch + held, dtype=torch.uint8, device=norms.device)
        begin = room.data_ptr()
        for own in tables:
            own.place(begin, begin + scratch, norms)
        if self._addresses is not addresses.tensor:
            self._addresses = addresses.tensor
            self._replay.forget()

        def launch_all() -> None:
            for own in tables:
                own.step(addresses)

        self._replay((chosen, kind), launch_all)

    def choose(self, measured: Measured, candidates: Collection[int], new: Collection[int]) -> None:
        """Find out how products of refreshed members may be taken. Waits for the device.

        Args:
            measured: The members' gradients, on which it is tried.
            candidates: Members that have just been refreshed.
            new: Those that never were before. The others have a way, and take a cheaper one only
                if it is near by far: the tables of kernels are made anew at every change.
        """
        found = dict.fromkeys(candidates, FLOAT32)
        addresses = measured.addresses
        there = frozenset(i for i in candidates if i in self._stacks.refreshed)
        if addresses is not None and any(map(addresses.values.__getitem__, there)):
            half = self._precision(HALF, addresses)
            sums = self._comparison_of(there, addresses).compare(addresses, measured.norms, half)
            cosines = (sums[:, 0] / (sums[:, 1].sqrt() * sums[:, 2].sqrt())).tolist()
            for i in there:
                found[i] = _way(cosines[i], HALF if i in new else self.ways[i])
        self.ways.update(found)

    def graph_refused(self) -> str | None:
        """Why the ordinary step could not be captured as a graph; ``None`` if it could be."""
        return self._replay.refused

    def _precision(self, way: int, addresses: AddressTable) -> Precision:
        """How products of such gradients are taken. G R̂ can have G as it is, in bf16."""
        from kronbit.gpu.tables import Precision

        half, first = way == HALF, self._stacks.rule[0]
        direct = half and addresses.brain and addresses.aligned and not first.left
        return Precision(precise=not half, direct=direct)

    def _comparison_of(self, members: frozenset[int], addresses: AddressTable) -> GroupedProducts:
        """The tables that ways are compared with. No graph holds them."""
        from kronbit.gpu.tables import Precision

        key = Precision(precise=True), members, members & addresses.channels_last
        return self._comparisons.obtain(key, lambda: self._make(key))

    def _make(self, key: _Key) -> GroupedProducts:
        from kronbit.gpu.ordinary_step import GroupedProducts

        precision, members, channels_last = key
        return GroupedProducts(self._stacks, members, precision, channels_last)

    def _tables(self, key: _Key) -> GroupedProducts:
        """The kernels' tables for some members. Recent ones are remembered."""
        return self._grouped.obtain(key, lambda: self._make(key))


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


def _way(cosine: float, before: int) -> int:
    """The cheapest way that is near enough: by half of the tolerance, if it is cheaper than now."""
    for way in _BY_KERNELS:
        degrees = _TOLERANCE[way] / (2 if way < before else 1)
        if cosine >= math.cos(math.radians(degrees)):  # False for NaN, where there is no gradient
            return way
    return FLOAT32
