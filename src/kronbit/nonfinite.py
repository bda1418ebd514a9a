"""Norms of the gradients, and the guard against non-finite ones, without waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def elements(grad: Tensor) -> Tensor:
    """A strided real tensor with the gradient's stored numbers: sparse and complex ones have it."""
    if grad.layout == torch.sparse_coo:
        grad = grad._values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


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

    def measure(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """‖G‖_F of each gradient in float32, and whether it is finite; 0 where there is none.

        A norm that overflows float32 counts as non-finite.
        """
        if not grads:
            return self._zero.new_empty(0), self._zero.new_empty(0, dtype=torch.bool)
        there = [elements(grad) for grad in grads if grad is not None]
        # torch refuses a norm in less than the input's precision
        wide = any(x.dtype == torch.float64 for x in there)
        dtype = torch.float64 if wide else torch.float32
        found = iter(torch._foreach_norm(there, 2.0, dtype=dtype) if there else ())
        norms = torch.stack([self._zero if g is None else next(found).float() for g in grads])
        finite = torch.isfinite(norms)
        self.skipped += (~finite).sum()
        return norms, finite

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
                stacklevel=2,
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
            self._copy = torch.zeros((), dtype=torch.int64, pin_memory=True), torch.cuda.Event()
        elif not self._copy[1].query():
            return 0
        else:
            seen = int(self._copy[0])
        self._copy[0].copy_(self.skipped, non_blocking=True)
        self._copy[1].record(torch.cuda.current_stream(device))
        return seen


def zero_where_nonfinite(grads: Sequence[Tensor], finite: Sequence[Tensor]) -> None:
    """Replace non-finite gradients by zero, decided on the device; finite ones keep their bits."""
    for grad, good in zip(grads, finite, strict=True):
        elements(grad).masked_fill_(~good, 0)
