"""Where gradients and buffers are at this step, for the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor

from kronbit.gradients import plain_dtypes
from kronbit.kernels.gradients import MOST_TAPS, Kind, tag, taps_tag

_TAGS = {
    torch.float32: tag(Kind.FLOAT32),
    torch.bfloat16: tag(Kind.BFLOAT16),
    torch.float16: tag(Kind.FLOAT16),
}
_DTYPES = {"i": torch.int32, "q": torch.int64}
# The bits of an entry that are not there if it can be read in words of 16 bytes.
_NARROW = taps_tag(MOST_TAPS) | 15
_NONE: Mapping[int, int] = {}


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


def turned(grads: Sequence[Tensor | None], taps: Sequence[int]) -> Mapping[int, int] | None:
    """Which of some plain gradients are in channels-last order.

    Args:
        grads: The gradients; ``None`` where there is none.
        taps: Of each, how many a convolution has; 0 where the order does not matter.

    Returns:
        Their taps, by number; ``None`` if the kernels cannot read one of them.
    """
    with suppress(TypeError):  # one is None
        if all(map(Tensor.is_contiguous, cast("Sequence[Tensor]", grads))):
            return _NONE
    found = {
        i: taps[i]
        for i, grad in enumerate(grads)
        if grad is not None and not grad.is_contiguous() and taps[i] != 0
    }
    return found if all(1 < own <= MOST_TAPS for own in found.values()) else None


def takable(grads: Sequence[Tensor | None], taps: Sequence[int]) -> list[Tensor | None]:
    """Those of the gradients that the kernels can read and write; ``None`` for the others."""
    return [
        grad
        if grad is not None
        and takes(plain_dtypes([grad]), [grad])
        and turned([grad], [own]) is not None
        else None
        for grad, own in zip(grads, taps, strict=True)
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
        aligned: Whether all of them begin at multiples of 16 bytes, as new tensors do, and none is
            in channels-last order.
        brain: Whether all of them are in bf16.
    """

    aligned = True
    brain = False
    # Addresses, their one dtype, and which are turned.
    _last: tuple[list[int], set[torch.dtype], Mapping[int, int]] | None = None

    def fill(
        self,
        grads: Sequence[Tensor | None],
        dtypes: set[torch.dtype] | None = None,
        turned: Mapping[int, int] = _NONE,
    ) -> None:
        """Note where gradients are now.

        Args:
            grads: Gradients that the kernels can take; ``None`` where there is none. If they are
                fewer than there is room for, the others count as gone.
            dtypes: All that they have, if that is known.
            turned: What ``turned`` says of them.
        """
        values: list[int] | None = None
        last = None
        if dtypes is not None and len(dtypes) == 1:
            # At nearly every step; a loop in Python takes twice as long.
            (dtype,) = dtypes
            with suppress(TypeError):  # one is None
                places = list(map(Tensor.data_ptr, cast("Sequence[Tensor]", grads)))
                last = places, dtypes, turned
                if last == self._last:
                    return  # gradients come back to where they were
                values = list(map(_TAGS[dtype].__add__, places))
        self._last = None
        if dtypes is None:
            dtypes = {grad.dtype for grad in grads if grad is not None}
        self.brain = dtypes == {torch.bfloat16}
        if values is None:
            values = [0 if g is None else g.data_ptr() + _TAGS[g.dtype] for g in grads]
        for i, taps in turned.items():
            values[i] += taps_tag(taps)
        values += [0] * (len(self.values) - len(values))
        if values != self.values:
            self.aligned = not any(map(_NARROW.__and__, values))
            self.write(values)
        self._last = last  # now that it stands there
