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
    from kronbit.norms import KernelNorms

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
    """The gradients of a step.

    Attributes:
        grads: The gradients; ``None`` where there is none.
        norms: ‖G‖_F of each in float32; 0 where there is none. Not finite where G is not, or where
            the sum of squares overflows float32.
        finite: bool, whether each norm is finite.
        kernel: What measured them, if it was a kernel.
    """

    grads: Sequence[Tensor | None]
    norms: Tensor
    finite: Tensor
    kernel: KernelNorms | None

    def zero_nonfinite(self, but: Collection[int]) -> None:
        """Replace non-finite gradients by zero, decided on the device; others keep their bits.

        Args:
            but: Gradients that need not be looked at, because that has been done.
        """
        if self.kernel is not None:
            self.kernel.zero_where_not(self.finite)
            return
        for i, (grad, bad) in enumerate(zip(self.grads, (~self.finite).unbind(), strict=True)):
            if grad is not None and i not in but:
                elements(grad).masked_fill_(bad, 0)


class NonfiniteGuard:
    """Measures the gradients on one device and counts those that are not finite.

    The count stays on the device. A copy of it reaches the host in the background and is looked
    at in a later step, so the one warning comes a little late and costs no synchronisation.

    Attributes:
        skipped: How many gradients (a parameter at a step) were not finite, on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._warned = False
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None
        self._kernel: KernelNorms | None = None

    def measure(self, grads: Sequence[Tensor | None]) -> Measured:
        """Norms and finiteness of a step's gradients."""
        kernel = self._kernel_for(grads)
        norms = self._norms(grads) if kernel is None else kernel.norms()
        return Measured(grads, norms, torch.isfinite(norms), kernel)

    def _kernel_for(self, grads: Sequence[Tensor | None]) -> KernelNorms | None:
        if not has_kernels(self.skipped.device):
            return None
        from kronbit.addresses import take
        from kronbit.norms import KernelNorms

        if not take([grad for grad in grads if grad is not None]):
            return None
        sizes = [0 if grad is None else grad.numel() for grad in grads]
        if self._kernel is None or self._kernel.sizes != sizes:
            self._kernel = KernelNorms(sizes, self.skipped.device)
        self._kernel.fill(grads)
        return self._kernel

    def _norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        there = [elements(grad) for grad in grads if grad is not None]
        # torch refuses a norm in less than the input's precision
        wide = any(x.dtype == torch.float64 for x in there)
        dtype = torch.float64 if wide else torch.float32
        found = iter(torch._foreach_norm(there, 2.0, dtype=dtype) if there else ())
        norms = [self._zero if grad is None else next(found).float() for grad in grads]
        return torch.stack(norms) if norms else self._zero.new_empty(0)

    def count(self, finite: Tensor) -> None:
        """Count a step's gradients that are not finite."""
        self.skipped += (~finite).sum()

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
        """The newest count that has reached the host; sends the next one on its way."""
        device = self.skipped.device
        if device.type == "cpu":
            return int(self.skipped)
        if device.type != "cuda":
            return 0  # the count is in diagnostics()
        seen = 0
        if self._copy is None:
            count = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._copy = count, torch.cuda.Event()
        elif not self._copy[1].query():
            return 0
        else:
            seen = int(self._copy[0])
        self._copy[0].copy_(self.skipped, non_blocking=True)
        self._copy[1].record(torch.cuda.current_stream(device))
        return seen
