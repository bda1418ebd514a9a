"""Norms of the gradients, and the guard against non-finite ones, without waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.acceleration import has_kernels

if TYPE_CHECKING:
    from kronbit.addresses import AddressTable
    from kronbit.norms import KernelNorms

# The count of non-finite gradients is sent to the host at one step in so many.
_SENT_EVERY = 16
# warn_once <- _prepare <- step <- torch's two wrappers <- the user
_TO_THE_USER = 6


def elements(grad: Tensor) -> Tensor:
    """A real strided view of the numbers that a gradient stores, be it sparse or complex."""
    if grad.layout == torch.sparse_coo:
        grad = grad._values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


@dataclass(frozen=True)
class Measured:
    """The gradients of a step, until its end.

    Attributes:
        grads: The gradients; ``None`` where there is none.
        norms: ‖G‖_F of each in float32; 0 where there is none. Not finite where G is not, or where
            the sum of squares overflows float32.
        finite: bool, whether each norm is finite.
        addresses: Where those are that the kernels can take; ``None`` where there are no kernels.
        kernel: What measured them, if it was a kernel: then kernels can take all of them.
    """

    grads: Sequence[Tensor | None]
    norms: Tensor
    finite: Tensor
    addresses: AddressTable | None
    kernel: KernelNorms | None

    def zero_nonfinite(self, but: Collection[int]) -> None:
        """Replace non-finite gradients by zero, decided on the device; others keep their bits.

        Args:
            but: Gradients that need not be looked at, because that has been done.
        """
        if self.kernel is not None and self.addresses is not None:
            self.kernel.zero_nonfinite(self.addresses.tensor)
            return
        for i, (grad, bad) in enumerate(zip(self.grads, (~self.finite).unbind(), strict=True)):
            if grad is not None and i not in but:
                elements(grad).masked_fill_(bad, 0)


class NonfiniteGuard:
    """Measures the gradients on one device and counts those that are not finite.

    The count stays on the device. Now and then a copy of it is sent to the host in the background
    and looked at when it has arrived, so the one warning comes a little late and costs no
    synchronisation.

    Attributes:
        skipped: How many gradients (a parameter at a step) were not finite, on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._warned = False
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None
        self._under_way = False
        self._steps = 0
        self._addresses: AddressTable | None = None
        self._kernel: KernelNorms | None = None

    def measure(
        self,
        grads: Sequence[Tensor | None],
        sizes: Sequence[int],
        dtypes: set[torch.dtype] | None,
        count: bool,
    ) -> Measured:
        """Norms and finiteness of a step's gradients.

        Args:
            grads: The gradients; ``None`` where there is none.
            sizes: Their numbers of elements; 0 where there is none.
            dtypes: What ``plain_dtypes`` says of them.
            count: Whether to count those that are not finite.
        """
        device = self.skipped.device
        if not has_kernels(device):
            return self._by_torch(grads, count, None)
        from kronbit.addresses import AddressTable, takable, takes

        # A table that is large enough stays: graphs have been captured with it.
        if self._addresses is None or len(self._addresses.values) < len(grads):
            self._addresses = AddressTable(len(grads), device)
        if not takes(dtypes, grads):
            self._addresses.fill(takable(grads))
            return self._by_torch(grads, count, self._addresses)
        self._addresses.fill(grads, dtypes)
        kernel = self._kernel_for(sizes)
        kernel.measure(self._addresses.tensor, self.skipped, count)
        return Measured(grads, kernel.norms, kernel.finite, self._addresses, kernel)

    def _kernel_for(self, sizes: Sequence[int]) -> KernelNorms:
        known = self._kernel
        if known is None or (known.sizes is not sizes and known.sizes != sizes):
            from kronbit.norms import KernelNorms

            known = self._kernel = KernelNorms(sizes, self.skipped.device)
        return known

    def _by_torch(
        self, grads: Sequence[Tensor | None], count: bool, addresses: AddressTable | None
    ) -> Measured:
        norms = self._norms(grads)
        finite = torch.isfinite(norms)
        if count:
            self.skipped += (~finite).sum()
        return Measured(grads, norms, finite, addresses, None)

    def _norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        there = [elements(grad) for grad in grads if grad is not None]
        # torch refuses a norm in less than the input's precision
        wide = any(x.dtype == torch.float64 for x in there)
        dtype = torch.float64 if wide else torch.float32
        found = iter(torch._foreach_norm(there, 2.0, dtype=dtype) if there else ())
        norms = [self._zero if grad is None else next(found).float() for grad in grads]
        return torch.stack(norms) if norms else self._zero.new_empty(0)

    def warn_once(self) -> None:
        """Warn if an earlier step is known to have seen a non-finite gradient."""
        if self._warned:
            return
        seen = self._arrived()
        if seen:
            self._warned = True
            warnings.warn(
                f"{seen} non-finite gradient(s) so far: kept out of the statistics; see "
                "diagnostics()['skipped_gradients'] and the option 'nonfinite'",
                RuntimeWarning,
                stacklevel=_TO_THE_USER,
            )

    def _arrived(self) -> int:
        """The count, if it has just reached the host; sends the next one when it is time."""
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
