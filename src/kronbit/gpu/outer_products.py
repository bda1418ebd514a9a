"""G Gᵀ and Gᵀ G of batches of blocks by kernels that read the gradients."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronbit.blocks.batches import Part, order_of
from kronbit.blocks.groups import Member
from kronbit.gpu.addresses import to_device
from kronbit.kernels import outer as kernels
from kronbit.kernels.cache import BoundedCache
from kronbit.kernels.launch import launch
from kronbit.kernels.matmul import PRODUCT, tiles
from kronbit.kernels.outer import TILE
from kronbit.kernels.split import padded

_CACHE_SIZE = 256


class OuterProducts:
    """Computes M, which is G Gᵀ or Gᵀ G, for members of one device.

    Args:
        members: The parameters.
        device: Device of the parameters.
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self._members, self._device = members, device
        self._tables: BoundedCache[Any, tuple[Tensor, int, int]] = BoundedCache(_CACHE_SIZE)

    def of(self, addresses: Tensor, finite: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return M of a batch; zero beyond a row's order, and where the gradient is not finite.

        Args:
            addresses: Table of the members' gradients.
            finite: bool (members,): True if the gradient is finite.
            parts: The rows.
        """
        n = order_of(parts)
        key = tuple((id(p.group), p.right, p.rows.start, p.rows.stop) for p in parts)
        lines, size, programs = self._tables.obtain(key, lambda: self._make_lines(parts))
        k = len(lines)
        hi, lo = (torch.empty(size, dtype=torch.float16, device=self._device) for _ in range(2))
        unit = torch.empty(k, dtype=torch.float32, device=self._device)
        largest = torch.zeros(k, dtype=torch.int32, device=self._device)
        read = lines, addresses, finite, largest
        launch(kernels.largest_kernel, (programs, k), *read, TILE=TILE)
        launch(kernels.copy_kernel, (programs, k), *read, hi, lo, unit, TILE=TILE)
        M = torch.empty(k, n, n, dtype=torch.float32, device=self._device)
        launch(kernels.outer_kernel, (tiles(n) ** 2, k), lines, hi, lo, unit, M, n, **PRODUCT)
        return M

    def _make_lines(self, parts: Sequence[Part]) -> tuple[Tensor, int, int]:
        """Return a line of integers per row, the size of all copies, and the programs of a block.

        The largest block determines the number of programs.
        """
        lines = array("q")
        size = largest = 0
        for part in parts:
            m, n = part.group.shape
            for row, member, _, first, stride, taps in part.group.locate(self._members):
                if not part.rows.start <= row < part.rows.stop:
                    continue
                depth = padded(m if part.right else n)
                lines.extend((member, m, n, first, stride, taps, part.right, size, depth))
                size += padded(m) * padded(n)
            largest = max(largest, padded(m) // TILE * (padded(n) // TILE))
        return to_device(lines, self._device, kernels.COUNT), size, largest
