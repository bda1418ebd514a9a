"""Tables of the addresses of gradients and buffers at a step, for the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor

from kronbit.blocks.gradients import plain_dtypes
from kronbit.kernels.gradients import CHANNELS_LAST, KIND_FROM

# Tags that are added to addresses, by the dtype of the gradient.
_DTYPES_OF_KINDS = (torch.float32, torch.bfloat16, torch.float16)
_TAGS = {dtype: kind << KIND_FROM for kind, dtype in enumerate(_DTYPES_OF_KINDS)}
_DTYPES = {"i": torch.int32, "q": torch.int64}
_TYPES = {Tensor, type(None)}  # of a distributed tensor, kernels would see only a part
_NONE: frozenset[int] = frozenset()


def supported(dtypes: set[torch.dtype] | None, grads: Sequence[Tensor | None]) -> bool:
    """True if the kernels can read and write all of these gradients.

    ``dtypes`` is the result of ``plain_dtypes`` for a list that contains these gradients.
    """
    return dtypes is not None and dtypes <= _TAGS.keys() and set(map(type, grads)) <= _TYPES


def channels_last(grads: Sequence[Tensor | None]) -> frozenset[int]:
    """Return the indices of plain gradients that are in channels-last order."""
    with suppress(TypeError):  # a gradient is None
        if all(map(Tensor.is_contiguous, cast("Sequence[Tensor]", grads))):
            return _NONE
    return frozenset(
        i for i, grad in enumerate(grads) if grad is not None and not grad.is_contiguous()
    )


def supported_or_none(grads: Sequence[Tensor | None], taps: Sequence[int]) -> list[Tensor | None]:
    """Return the gradients, with ``None`` for those that the kernels cannot read and write.

    For ``taps``, see ``NonfiniteGuard.measure``.
    """
    return [
        grad
        if grad is not None
        and supported(plain_dtypes([grad]), [grad])
        and (grad.is_contiguous() or not taps or taps[i] != 1)
        else None
        for i, grad in enumerate(grads)
    ]


def to_device(values: array[int], device: torch.device, columns: int = 1) -> Tensor:
    """Return a table of integers on a device, without waiting for the device."""
    host = _sendable(values, device).view(-1, columns)
    return host.to(device, non_blocking=True, copy=True)


def _sendable(values: array[int], device: torch.device) -> Tensor:
    """Return numbers that can be copied to a device without waiting for it.

    Torch's allocator does not reuse pinned memory before the copy has ended.
    """
    # torch.tensor(list) takes four times as long.
    host = torch.frombuffer(values, dtype=_DTYPES[values.typecode])
    return host.pin_memory() if device.type == "cuda" else host


class Integers:
    """A few integers on the device, at a fixed address; written only when they change.

    Args:
        count: Number of integers, which are zero at first.
        device: Device of the integers.

    Attributes:
        values: The integers on the device after all pending copies.
        tensor: int64 (count,).
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.values = [0] * count
        self.tensor = torch.zeros(count, dtype=torch.int64, device=device)

    def write(self, values: list[int]) -> None:
        """Set all integers, in stream order and without waiting for the device."""
        if values != self.values:
            host = _sendable(array("q", values), self.tensor.device)
            self.tensor.copy_(host, non_blocking=True)
            self.values = values


class AddressTable(Integers):
    """Addresses and kinds of the gradients of a step (``kernels.gradients``).

    Attributes:
        aligned: True if all gradients begin at multiples of 16 bytes, as new tensors do.
        all_bf16: True if all gradients are in bf16.
        channels_last: Indices of gradients in channels-last order.
    """

    aligned = True
    all_bf16 = False
    channels_last = _NONE
    # Addresses, the single dtype, and the channels-last indices of the last step.
    _last: tuple[list[int], set[torch.dtype], frozenset[int]] | None = None

    def fill(
        self,
        grads: Sequence[Tensor | None],
        dtypes: set[torch.dtype] | None = None,
        channels_last: frozenset[int] = _NONE,
    ) -> None:
        """Write the addresses of gradients.

        Args:
            grads: Gradients that the kernels support, or None. Entries of the table beyond them
                become 0.
            dtypes: All dtypes of the gradients, if known.
            channels_last: Indices of gradients in channels-last order.
        """
        values: list[int] | None = None
        last = None
        if dtypes is not None and len(dtypes) == 1:
            # Nearly every step takes this path; a loop in Python takes twice as long.
            (dtype,) = dtypes
            with suppress(TypeError):  # a gradient is None
                pointers = list(map(Tensor.data_ptr, cast("Sequence[Tensor]", grads)))
                last = pointers, dtypes, channels_last
                if last == self._last:
                    return  # gradients often have the addresses of the last step
                values = list(map(_TAGS[dtype].__add__, pointers))
        self._last = None
        if dtypes is None:
            dtypes = {grad.dtype for grad in grads if grad is not None}
        self.all_bf16 = dtypes == {torch.bfloat16}
        if values is None:
            values = [0 if g is None else g.data_ptr() + _TAGS[g.dtype] for g in grads]
        for i in channels_last:
            values[i] += CHANNELS_LAST
        self.channels_last = channels_last
        values += [0] * (len(self.values) - len(values))
        if values != self.values:
            self.aligned = not any(map((15).__and__, values))
            self.write(values)
        self._last = last  # only after a successful write
