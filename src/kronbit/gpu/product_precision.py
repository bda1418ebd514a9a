"""Products L̂ G R̂ by kernels, in the cheapest precision that is accurate enough."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.groups import DeviceStacks
from kronbit.gpu.precision import Precision
from kronbit.kernels.cache import BoundedCache
from kronbit.kernels.graphs import Replay
from kronbit.linalg.precision import BF16X3, FLOAT32, HALF

if TYPE_CHECKING:
    from kronbit.gpu.addresses import AddressTable
    from kronbit.gpu.measured import Measured
    from kronbit.gpu.ordinary_step import GroupedProducts

# Largest angle, in degrees, between Ĝ in HALF and in BF16X3 at which a precision may be chosen.
# BF16X3 has five more bits, so its error is a 32nd of this angle: either error is at most half a
# degree. Kernels compute these precisions, the cheapest first.
_TOLERANCE = {HALF: 0.5, BF16X3: 16.0}
_CACHE_SIZE = 64


# Precision, members, and members whose gradients are in channels-last order.
_Key: TypeAlias = tuple[Precision, frozenset[int], frozenset[int]]


class KernelProducts:
    """Computes products with kernels, for members whose measured error permits reduced precision.

    Args:
        stacks: The members' state.
        graphs: True if the ordinary step may be a CUDA graph.

    Attributes:
        bits: Bits of the operands of each member's products. At the member's last refresh, Ĝ with
            these bits was within half a degree of Ĝ in float32.
    """

    def __init__(self, stacks: DeviceStacks, graphs: bool) -> None:
        self._stacks = stacks
        self.bits = dict.fromkeys(range(len(stacks.members)), FLOAT32)
        # Graphs of the step, keyed by bits, their members and common properties of the
        # gradients, for one table of addresses.
        self._replay = Replay(stacks.device, graphs)
        self._addresses: Tensor | None = None
        # Graphs may hold the tables. No lambda: a reference cycle would keep the stacks in memory
        # until a garbage collection.
        self._grouped: BoundedCache[_Key, GroupedProducts] = BoundedCache(
            _CACHE_SIZE, keep_used=True, on_eviction=self._replay.forget
        )
        # For comparisons: under ``stagger``, the same members return every interval.
        self._comparisons: BoundedCache[_Key, GroupedProducts] = BoundedCache(_CACHE_SIZE)
        # In the last step: refreshed members and their bits; bits and members that kernels
        # compute; and the members that torch computes, in order.
        self._divided: tuple[set[int], dict[int, int]] = (set(), {})
        self._by_kernels: list[tuple[int, frozenset[int]]] = []
        self._by_torch: tuple[int, ...] = ()
        # The key and the tables of the last step.
        self._last: tuple[Any, list[GroupedProducts]] = (None, [])

    def precondition(self, measured: Measured, addresses: AddressTable) -> Sequence[int]:
        """Write G̃ over the gradients that kernels support.

        Args:
            measured: The members' gradients; others may follow.
            addresses: Table of the gradients that the kernels support.

        Returns:
            The refreshed members that are left to torch, in order; some may have no gradient.
        """
        refreshed = self._stacks.refreshed
        if self._divided != (refreshed, self.bits):
            self._divide(set(refreshed), dict(self.bits))
        entries = addresses.values
        # Members without a gradient are skipped: tables do not depend on which members have one.
        chosen = tuple(
            (bits, members)
            for bits, members in self._by_kernels
            if any(map(entries.__getitem__, members))
        )
        if chosen:
            self.step(chosen, addresses, measured.norms)
        if measured.by_kernels:
            return self._by_torch
        return [i for i in sorted(refreshed) if i in self._by_torch or not entries[i]]

    def _divide(self, refreshed: set[int], bits_of: dict[int, int]) -> None:
        """Group members by the bits of their products."""
        by_bits = {
            bits: frozenset(i for i in refreshed if bits_of[i] == bits) for bits in _TOLERANCE
        }
        self._divided = refreshed, bits_of
        self._by_kernels = [(bits, members) for bits, members in by_bits.items() if members]
        self._by_torch = tuple(i for i in sorted(refreshed) if bits_of[i] not in _TOLERANCE)

    def step(
        self, chosen: tuple[tuple[int, frozenset[int]], ...], addresses: AddressTable, norms: Tensor
    ) -> None:
        """Write G̃ over the gradients of the chosen members.

        Args:
            chosen: Pairs of bits and the members whose products have these bits.
            addresses: Table of the gradients.
            norms: ‖G‖_F of each gradient. If a norm is not finite, its gradient is unchanged.
        """
        kind = addresses.aligned, addresses.all_bf16, addresses.channels_last
        if (chosen, kind) != self._last[0]:
            keys = [
                (self._precision(bits, addresses), members, members & addresses.channels_last)
                for bits, members in chosen
            ]
            self._last = (chosen, kind), [self._tables(key) for key in keys]
        tables = self._last[1]
        # One allocation: two take the host twice as long.
        scratch = max(table.scratch_bytes for table in tables)
        held = max(table.held_bytes for table in tables)
        buffer = torch.empty(scratch + held, dtype=torch.uint8, device=norms.device)
        begin = buffer.data_ptr()
        for table in tables:
            table.set_buffers(begin, begin + scratch, norms)
        if self._addresses is not addresses.tensor:
            self._addresses = addresses.tensor
            self._replay.forget()

        def launch_all() -> None:
            for table in tables:
                table.step(addresses)

        self._replay((chosen, kind), launch_all)

    def choose(self, measured: Measured, candidates: Collection[int], new: Collection[int]) -> None:
        """Choose the bits of refreshed members' products. Waits for the device.

        Args:
            measured: The members' gradients, on which errors are measured.
            candidates: Members that have just been refreshed.
            new: Members that were refreshed for the first time. Other members switch to fewer bits
                only if the error is at most half of the tolerance: every switch makes new tables.
        """
        chosen = dict.fromkeys(candidates, FLOAT32)
        addresses = measured.addresses
        refreshed = frozenset(i for i in candidates if i in self._stacks.refreshed)
        if addresses is not None and any(map(addresses.values.__getitem__, refreshed)):
            half = self._precision(HALF, addresses)
            key = Precision(precise=True), refreshed, refreshed & addresses.channels_last
            comparison = self._comparisons.obtain(key, lambda: self._make(key))  # not in a graph
            sums = comparison.compare(addresses, measured.norms, half)
            cosines = (sums[:, 0] / (sums[:, 1].sqrt() * sums[:, 2].sqrt())).tolist()
            for i in refreshed:
                chosen[i] = _least_bits(cosines[i], HALF if i in new else self.bits[i])
        self.bits.update(chosen)

    def graph_refused(self) -> str | None:
        """Return why the ordinary step could not be captured as a graph; ``None`` if it could."""
        return self._replay.refused

    def _precision(self, bits: int, addresses: AddressTable) -> Precision:
        """Return the precision for these bits and gradients. In bf16, G R̂ can read G directly."""
        half, first = bits == HALF, self._stacks.rule[0]
        direct = half and addresses.all_bf16 and addresses.aligned and not first.left
        return Precision(precise=not half, direct=direct)

    def _make(self, key: _Key) -> GroupedProducts:
        from kronbit.gpu.ordinary_step import GroupedProducts

        precision, members, channels_last = key
        return GroupedProducts(self._stacks, members, precision, channels_last)

    def _tables(self, key: _Key) -> GroupedProducts:
        """Return the tables for a key, from the cache if possible."""
        return self._grouped.obtain(key, lambda: self._make(key))


def _least_bits(cosine: float, before: int) -> int:
    """Return the fewest bits within tolerance, which is halved for fewer bits than before."""
    for bits, tolerance in _TOLERANCE.items():
        degrees = tolerance / (2 if bits < before else 1)
        if cosine >= math.cos(math.radians(degrees)):  # False for NaN, where there is no gradient
            return bits
    return FLOAT32
