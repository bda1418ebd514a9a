"""Norms of the gradients, and the guard against non-finite ones, without waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

# warn_once <- _prepare <- step <- torch's two wrappers <- the user
_TO_THE_USER = 6


def elements(grad: Tensor) -> Tensor:
    """A real strided view of the numbers that a gradient stores, be it sparse or complex."""
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

    def norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """‖G‖_F of each gradient in float32; 0 where there is none.

        Not finite where G is not, or where the sum of squares overflows float32.
        """
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


def zero_where_nonfinite(grads: Sequence[Tensor], finite: Tensor) -> None:
    """Replace non-finite gradients by zero, decided on the device; finite ones keep their bits."""
    for grad, bad in zip(grads, (~finite).unbind(), strict=True):
        elements(grad).masked_fill_(bad, 0)
