"""Norms of many gradients in two launches; a third launch zeroes non-finite gradients."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kronbit.gpu.addresses import to_device
from kronbit.kernels.gradients import norms_kernel, squares_kernel, zero_kernel
from kronbit.kernels.launch import launch

_BLOCK, _ROUNDS = 2048, 8  # elements of a round, and rounds of a piece of a gradient
_SUMMED = 256  # pieces of a gradient that are summed together


class KernelNorms:
    """Norms of gradients of given sizes on one device.

    Args:
        sizes: Elements of each gradient. A gradient whose address is 0 counts as zero.
        device: Device of the gradients.

    Attributes:
        norms: ‖G‖_F of each gradient in float32, as last measured.
        finite: bool, True if a norm is finite.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = sizes
        piece = _BLOCK * _ROUNDS
        tiles = array("q")
        for i, size in enumerate(sizes):
            for start in range(0, size, piece):
                tiles.extend((i, start, min(start + piece, size)))
        self._programs = len(tiles) // 3
        self._tiles = to_device(tiles or array("q", (0, 0, 0)), device, 3)
        ends = accumulate((-(-size // piece) for size in sizes), initial=0)
        self._ends = to_device(array("q", ends), device)
        self._squares = torch.zeros(max(1, self._programs), dtype=torch.float32, device=device)
        self.norms = torch.zeros(len(sizes), dtype=torch.float32, device=device)
        self._finite = torch.ones(len(sizes), dtype=torch.uint8, device=device)
        self.finite = self._finite.view(torch.bool)

    def measure(self, addresses: Tensor, skipped: Tensor, count: bool) -> None:
        """Measure norms and finiteness, reproducibly to the bit.

        Args:
            addresses: Table of the gradients' addresses.
            skipped: int64, a counter of non-finite gradients.
            count: True if ``skipped`` is incremented.
        """
        if not self._programs:
            return
        self._launch(squares_kernel, addresses, self._squares)
        numbers = self._ends, self._squares, self.norms, self._finite, skipped
        launch(norms_kernel, (len(self.sizes),), *numbers, COUNT=count, BLOCK=_SUMMED)

    def zero_nonfinite(self, addresses: Tensor) -> None:
        """Zero non-finite gradients; all other gradients are unchanged."""
        if self._programs:
            self._launch(zero_kernel, addresses, self._finite)

    def _launch(self, kernel: Any, addresses: Tensor, numbers: Tensor) -> None:
        """Launch a kernel with one program for each piece of a gradient."""
        tensors = self._tiles, addresses, numbers
        launch(kernel, (self._programs,), *tensors, BLOCK=_BLOCK, ROUNDS=_ROUNDS)
