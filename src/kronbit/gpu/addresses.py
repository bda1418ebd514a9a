"""Where gradients and buffers are at this step, for the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor

from kronbit.blocks.gradients import plain_dtypes
from kronbit.kernels.gradients import CHANNELS_LAST, Kind, tag

_TAGS = {
    torch.float32: tag(Kind.FLOAT32),
    torch.bfloat16: tag(Kind.BFLOAT16),
    torch.float16: tag(Kind.FLOAT16),
}
_DTYPES = {"i": torch.int32, "q": torch.int64}
_NOBODY: frozenset[int] = frozenset()


def takes(dtypes: set[torch.dtype] | None, grads: Sequence[Tensor | None]) -> bool:
    """Whether the kernels can read and write all of these gradients.

    Args:
        dtypes: What ``plain_dtypes`` says of them, or of more gradients.
        grads: The gradients; ``None`` where there is none.
    """
    return (
        dtypes is not None
        and dtypes <= _TAGS.keys()
        and set(map(type, grads)) <= {Tensor, type(None)}  # of a distributed one they see a part
    )


def channels_last(grads: Sequence[Tensor | None]) -> frozenset[int]:
    """Which of some plain gradients are in channels-last order."""
    with suppress(TypeError):  # one is None
        if all(map(Tensor.is_contiguous, cast("Sequence[Tensor]", grads))):
            return _NOBODY
    there = ((i, grad) for i, grad in enumerate(grads) if grad is not None)
    return frozenset(i for i, grad in there if not grad.is_contiguous())


def takable(grads: Sequence[Tensor | None], taps: Sequence[int]) -> list[Tensor | None]:
    """Those of the gradients that the kernels can read and write; ``None`` for the others.

    Args:
        grads: The gradients; ``None`` where there is none.
        taps: As ``NonfiniteGuard.measure`` is given them.
    """
    return [
        grad
        if grad is not None
        and takes(plain_dtypes([grad]), [grad])
        and (grad.is_contiguous() or not taps or taps[i] != 1)
        else None
        for i, grad in enumerate(grads)
    ]


def to_device(values: array[int], device: torch.device, columns: int = 1) -> Tensor:
    """A table of integers of this many columns, without waiting for the device."""
    host = _sendable(values, device).view(-1, columns)
    return host.to(device, non_blocking=True, copy=True)


def _sendable(values: array[int], device: torch.device) -> Tensor:
    """Numbers that can be copied to a device without waiting for it.

    Pinned memory is not reused before the copy is over: torch's allocator sees to it.
    """
    # Of a list, torch.tensor makes four times as slowly what an array already is.
    host = torch.frombuffer(values, dtype=_DTYPES[values.typecode])
    return host.pin_memory() if device.type == "cuda" else host


class Integers:
    """A few integers on the device, at a place that stays; written only when they change.

    Args:
        count: How many there are; all are zero at first.
        device: Where they are.

    Attributes:
        values: What stands there, or will, once the device gets to it.
        tensor: int64 (count,).
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.values = [0] * count
        self.tensor = torch.zeros(count, dtype=torch.int64, device=device)

    def write(self, values: list[int]) -> None:
        """Set all of them, in stream order and without waiting for the device."""
        if values != self.values:
            host = _sendable(array("q", values), self.tensor.device)
            self.tensor.copy_(host, non_blocking=True)
            self.values = values


class AddressTable(Integers):
    """Where a step's gradients are, and of which kind (``kernels.gradients``).

    Attributes:
        aligned: Whether all of them begin at multiples of 16 bytes, as new tensors do.
        brain: Whether all of them are in bf16.
        channels_last: Which are in that order.
    """

    aligned = True
    brain = False
    channels_last = _NOBODY
    # Addresses, their one dtype, and who was in channels-last order.
    _last: tuple[list[int], set[torch.dtype], frozenset[int]] | None = None

    def fill(
        self,
        grads: Sequence[Tensor | None],
        dtypes: set[torch.dtype] | None = None,
        channels_last: frozenset[int] = _NOBODY,
    ) -> None:
        """Note where gradients are now.

        Args:
            grads: Gradients that the kernels can take; ``None`` where there is none. If they are
                fewer than there is room for, the others count as gone.
            dtypes: All that they have, if that is known.
            channels_last: Which are in that order.
        """
        values: list[int] | None = None
        last = None
        if dtypes is not None and len(dtypes) == 1:
            # At nearly every step; a loop in Python takes twice as long.
            (dtype,) = dtypes
            with suppress(TypeError):  # one is None
                places = list(map(Tensor.data_ptr, cast("Sequence[Tensor]", grads)))
                last = places, dtypes, channels_last
                if last == self._last:
                    return  # gradients come back to where they were
                values = list(map(_TAGS[dtype].__add__, places))
        self._last = None
        if dtypes is None:
            dtypes = {grad.dtype for grad in grads if grad is not None}
        self.brain = dtypes == {torch.bfloat16}
        if values is None:
            values = [0 if g is None else g.data_ptr() + _TAGS[g.dtype] for g in grads]
        for i in channels_last:
            values[i] += CHANNELS_LAST
        self.channels_last = channels_last
        values += [0] * (len(self.values) - len(values))
        if values != self.values:
            self.aligned = not any(map((15).__and__, values))
            self.write(values)
        self._last = last  # now that it stands there
