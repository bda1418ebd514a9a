"""Norms of gradients, and the guard against non-finite ones, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.blocks.gradients import elements
from kronbit.config import Config
from kronbit.gpu.measured import Measured
from kronbit.kernels.graphs import Replay
from kronbit.linalg.backend import backend
from kronbit.messages import warn

if TYPE_CHECKING:
    from kronbit.gpu.addresses import AddressTable
    from kronbit.gpu.norms import KernelNorms

# Steps between two copies of the count of non-finite gradients to the host.
_SENT_EVERY = 16


class NonfiniteGuard:
    """Measures the gradients on one device; counts non-finite ones and replaces them by zeros.

    Every few steps, the count is copied to the host in the background and read once it has arrived.
    So the warning, which is issued once, comes a few steps late and costs no synchronisation.

    Attributes:
        skipped: Number of non-finite gradients so far (one parameter at one step counts once), on
            the device.
    """

    def __init__(self, device: torch.device, config: Config) -> None:
        self._counts, self._zeroes = config.nonfinite != "raise", config.nonfinite == "zero"
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._warned = False
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None
        self._under_way = False
        self._steps = 0
        self._addresses: AddressTable | None = None
        self._kernel: KernelNorms | None = None
        self._replay = Replay(device, config.cuda_graph)

    def measure(
        self,
        grads: Sequence[Tensor | None],
        sizes: Sequence[int],
        taps: Sequence[int],
        dtypes: set[torch.dtype] | None,
    ) -> Measured:
        """Measure norms and finiteness of a step's gradients.

        With ``nonfinite="zero"``, the device sets non-finite gradients to zero.

        Args:
            grads: The gradients; None where a parameter has none.
            sizes: Number of elements of each gradient; ignored where it is None.
            taps: Number of taps of each convolution whose channels-last order the kernels can read;
                1 for other members, 0 for parameters that are left to F. Empty if no gradient can
                be channels-last.
            dtypes: Result of ``plain_dtypes``.
        """
        device = self.skipped.device
        if not backend(device).by_kernels:
            return self._by_torch(grads, None)
        from kronbit.gpu.addresses import AddressTable, channels_last, supported, supported_or_none

        # Captured graphs hold the table, so a table that is large enough is reused.
        addresses = self._addresses
        if addresses is None or len(addresses.values) < len(grads):
            addresses = self._addresses = AddressTable(len(grads), device)
            self._replay.forget()
        plain = supported(dtypes, grads)
        reordered = channels_last(grads) if plain and taps else frozenset()
        if not plain or any(taps[i] == 1 for i in reordered):
            some = supported_or_none(grads, taps)
            addresses.fill(some, channels_last=channels_last(some))
            return self._by_torch(grads, addresses)
        addresses.fill(grads, dtypes, reordered)
        kernel = self._kernel_for(sizes)

        def launch_all() -> None:
            kernel.measure(addresses.tensor, self.skipped, self._counts)
            if self._zeroes:
                kernel.zero_nonfinite(addresses.tensor)

        self._replay("measure", launch_all)
        return Measured(grads, kernel.norms, kernel.finite, addresses, by_kernels=True)

    def _kernel_for(self, sizes: Sequence[int]) -> KernelNorms:
        kernel = self._kernel
        if kernel is None or (kernel.sizes is not sizes and kernel.sizes != sizes):
            from kronbit.gpu.norms import KernelNorms

            kernel = self._kernel = KernelNorms(sizes, self.skipped.device)
            self._replay.forget()
        return kernel

    def _by_torch(self, grads: Sequence[Tensor | None], addresses: AddressTable | None) -> Measured:
        norms = self._norms(grads)
        finite = torch.isfinite(norms)
        if self._counts:
            self.skipped += (~finite).sum()
        if self._zeroes:
            for grad, bad in zip(grads, (~finite).unbind(), strict=True):
                if grad is not None:
                    elements(grad).masked_fill_(bad, 0)
        return Measured(grads, norms, finite, addresses, by_kernels=False)

    def _norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        present = [elements(grad) for grad in grads if grad is not None]
        # torch refuses a norm in less than the input's precision
        wide = any(x.dtype == torch.float64 for x in present)
        dtype = torch.float64 if wide else torch.float32
        measured = iter(torch._foreach_norm(present, 2.0, dtype=dtype) if present else ())
        norms = [self._zero if grad is None else next(measured).float() for grad in grads]
        return torch.stack(norms) if norms else self._zero.new_empty(0)

    def graph_refused(self) -> str | None:
        """Return why launches could not be captured as a graph; ``None`` if no capture failed."""
        return self._replay.refused

    def warn_once(self) -> None:
        """Warn, once, when a non-finite gradient has been counted."""
        if not self._warned and (count := self._arrived()):
            self._warned = True
            warn(
                f"{count} non-finite gradient(s) so far: kept out of the statistics; see "
                "diagnostics()['skipped_gradients'] and the option 'nonfinite'"
            )

    def _arrived(self) -> int:
        """Return the count if a copy has just arrived, else 0; send the next copy when due."""
        device = self.skipped.device
        if device.type == "cpu":
            return int(self.skipped)
        if device.type != "cuda":
            return 0  # the count is in diagnostics()
        if self._copy is None:
            count = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._copy = count, torch.cuda.Event()
        count, arrival = self._copy
        if self._under_way and arrival.query():
            self._under_way = False
            return int(count)
        if not self._under_way and self._steps % _SENT_EVERY == 0:
            count.copy_(self.skipped, non_blocking=True)
            arrival.record(torch.cuda.current_stream(device))
            self._under_way = True
        self._steps += 1
        return 0
