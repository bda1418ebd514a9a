"""Where gradients and buffers are at this step, for the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from kronbit.gradients import are_plain
from kronbit.kernels.gradients import Header, Kind

_KINDS = {
    torch.float32: int(Kind.FLOAT32),
    torch.bfloat16: int(Kind.BFLOAT16),
    torch.float16: int(Kind.FLOAT16),
}


def take(grads: Sequence[Tensor]) -> bool:
    """Whether the kernels can read and write all of these gradients."""
    return (
        set(map(type, grads)) <= {Tensor}  # of a distributed tensor they would see a part
        and are_plain(grads)
        and set(map(attrgetter("dtype"), grads)) <= _KINDS.keys()
    )


def on_host(values: Sequence[object], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor from numbers, ready to be copied to a device without waiting for it.

    Pinned memory is not reused before the copy is over: torch's allocator sees to it.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host


def to_device(values: Sequence[object], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor from numbers, without waiting for the device."""
    return on_host(values, device, dtype).to(device, non_blocking=True)


class AddressTable:
    """Addresses of a step's buffers and gradients, on the device, at a place that stays.

    Args:
        gradients: How many gradients there are.
        device: Where the table is.
    """

    def __init__(self, gradients: int, device: torch.device) -> None:
        self._values = [0] * (Header.LENGTH + 2 * gradients)
        self.tensor = torch.zeros(len(self._values), dtype=torch.int64, device=device)

    def fill(self, grads: Mapping[int, Tensor], **buffers: int) -> None:
        """Note where gradients and buffers are now; gradients that are not given count as gone."""
        values = [0] * len(self._values)
        for name, address in buffers.items():
            values[Header[name]] = address
        for i, grad in grads.items():
            place = Header.LENGTH + 2 * i
            values[place], values[place + 1] = grad.data_ptr(), _KINDS[grad.dtype]
        if values != self._values:
            self._values = values
            table = on_host(values, self.tensor.device, torch.int64)
            self.tensor.copy_(table, non_blocking=True)
