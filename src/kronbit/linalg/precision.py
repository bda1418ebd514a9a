"""Precision of products: full float32 for factor math, independent of the user's settings.

A product in TF32 or bf16 loses small eigenvalues, which the inverse root amplifies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kronbit.interruptions import cleaning_up

# Precisions of the products L̂ G R̂, named by the bits of their operands: float32 by torch, which is
# the contract; sums of two bf16 numbers; float16, but a gradient in bf16 stays in bf16.
FLOAT32, BF16X3, HALF = 24, 16, 11
PRODUCT_BITS = (FLOAT32, BF16X3, HALF)

# Settings of float32 products (cuBLAS; oneDNN on the CPU), and those they inherit if "none".
_BACKENDS = (
    (torch.backends.cuda.matmul, torch.backends.cudnn),
    (torch.backends.mkldnn.matmul, torch.backends.mkldnn),  # type: ignore[attr-defined]
)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_local = threading.local()


@contextmanager
def full_precision() -> Iterator[None]:
    """Run float32 products in IEEE float32, without autocast; restore all settings at the end."""
    autocast = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    if getattr(_local, "inside", False) and not autocast:  # reading the settings is slow
        yield
        return
    lowered = []
    for backend, parent in _BACKENDS:
        precision = backend.fp32_precision
        if precision in ("tf32", "bf16"):
            lowered.append((backend, "none" if parent.fp32_precision == precision else precision))

    def restore() -> None:
        for backend, setting in lowered:
            backend.fp32_precision = setting
        for device in autocast:
            torch.set_autocast_enabled(device, True)
        _local.inside = False

    with cleaning_up(restore):
        _local.inside = True
        for device in autocast:
            torch.set_autocast_enabled(device, False)
        for backend, _ in lowered:
            backend.fp32_precision = "ieee"
        yield
