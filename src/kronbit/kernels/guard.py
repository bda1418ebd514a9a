"""The one guard in front of every Triton kernel.

Pure torch is the contract on every device. A kernel computes the same thing faster, and is asked
for here, at each use: ``KRONBIT_KERNELS=0`` in the environment turns all of them off.
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
    """Why kernels are not used on a device; ``None`` if they are."""
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
    """Why a kernel cannot be compiled and launched here; it needs a C compiler, for one."""
    from kronbit.kernels.split import split

    try:
        for _ in range(2):  # to be compiled, and to be launched as it is from then on
            split(torch.ones(1, 1, 1, device=device), 1.0)
    except Exception as error:
        return f"Triton does not work: {type(error).__name__}: {error}"
    return None


def has_kernels(device: torch.device) -> bool:
    """Whether kernels are used for tensors on a device."""
    return why_not(device) is None


@cache
def processors(device: torch.device) -> int:
    """How many programs of a kernel run side by side, one on each."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
