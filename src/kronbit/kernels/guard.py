"""The one guard in front of every Triton kernel.

Pure torch is the contract on every device. A kernel computes the same result faster; this module
decides once per device whether kernels run. ``KRONBIT_KERNELS=0`` in the environment disables them.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

_OFF = "KRONBIT_KERNELS"
_LEAST_CAPABILITY = (8, 0)  # bf16 on the tensor cores


@cache
def why_not(device: torch.device) -> str | None:
    """Return why kernels are not used on a device; ``None`` if they are."""
    if os.environ.get(_OFF) == "0":
        return f"{_OFF}=0"
    if device.type != "cuda":
        return f"no kernels for {device.type}"
    if torch.version.hip is not None:
        return "no kernels for ROCm"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"compute capability {capability} is below {_LEAST_CAPABILITY}"
    return _trial(device)


def _trial(device: torch.device) -> str | None:
    """Return why a kernel cannot be compiled and launched; a C compiler may be missing."""
    from kronbit.kernels.split import split

    try:
        for _ in range(2):  # the first launch compiles, the second takes the usual path
            split(torch.ones(1, 1, 1, device=device), 1.0)
    except Exception as error:
        return f"Triton does not work: {type(error).__name__}: {error}"
    return None


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors, which run programs side by side."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
