"""Norms of many gradients by one launch, and zeros for those that are not finite by another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kronbit.addresses import AddressTable, to_device
from kronbit.kernels.gradients import norms_kernel, zero_kernel
from kronbit.kernels.launch import launch

_BLOCK, _ROUNDS = 2048, 8


class KernelNorms:
    """Gradients of given sizes on one device.

    Args:
        sizes: Elements of each gradient; 0 where there is none.
        device: Where they are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = list(sizes)
        piece = _BLOCK * _ROUNDS
        tiles = [
            (i, start, min(start + piece, size))
            for i, size in enumerate(sizes)
            for start in range(0, size, piece)
        ]
        self._tiles = to_device(tiles or [(0, 0, 0)], device, torch.int64)
        lengths = [-(-size // piece) for size in sizes]
        self._lengths = to_device(lengths, device, torch.int64)
        self._squares = torch.zeros(sum(lengths), dtype=torch.float32, device=device)
        self._addresses = AddressTable(len(sizes), device)

    def fill(self, grads: Sequence[Tensor | None]) -> None:
        """Note where the gradients are now."""
        self._addresses.fill({i: grad for i, grad in enumerate(grads) if grad is not None})

    def norms(self) -> Tensor:
        """‖G‖_F of each; summed up in the same order every time."""
        if len(self._squares):
            launch(
                norms_kernel,
                (len(self._squares),),
                self._tiles,
                self._addresses.tensor,
                self._squares,
                BLOCK=_BLOCK,
                ROUNDS=_ROUNDS,
            )
        sums = torch.segment_reduce(self._squares, "sum", lengths=self._lengths, unsafe=True)
        return sums.sqrt_()

    def zero_where_not(self, finite: Tensor) -> None:
        """Zero the gradients that are not finite; the others keep their bits."""
        if len(self._squares):
            launch(
                zero_kernel,
                (len(self._squares),),
                self._tiles,
                self._addresses.tensor,
                finite,
                BLOCK=_BLOCK,
                ROUNDS=_ROUNDS,
            )
