"""Common configurations, random matrices, and measures of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

# The paper's method and storage, which are not the defaults.
PAPER: dict[str, Any] = {"method": "eigen", "storage": "paper"}
# Every method with the bits that it supports.
METHODS = [
    ("dense", 32),
    ("eigen", 32),
    ("eigen", 8),
    ("eigen", 6),
    ("eigen", 4),
    ("eigen", 3),
    ("naive", 8),
    ("naive", 6),
    ("naive", 4),
    ("naive", 3),
    ("cholesky", 32),
    ("cholesky", 8),
    ("cholesky", 4),
]


# Marks tests that are slow on a CPU, mostly because Triton interprets kernels there. For each of
# them, a faster test covers the same property. On a GPU, all of them run.
slow = pytest.mark.slow


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise an error if an operation in the block waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def orthogonal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random orthogonal matrices."""
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype)


def spd(k: int, n: int, condition: float) -> Tensor:
    """Return random positive definite matrices in float64 with log-spaced eigenvalues."""
    U = orthogonal(k, n, n)
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n).double()
    return (U * spectrum) @ U.mT


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Return ‖x - reference‖ / ‖reference‖ in float64."""
    x, reference = x.detach().cpu().double(), reference.detach().cpu().double()
    return float((x - reference).norm() / reference.norm())


def angle(x: Tensor, reference: Tensor) -> float:
    """Return the angle between two tensors in degrees."""
    x, reference = x.detach().cpu().double().flatten(), reference.detach().cpu().double().flatten()
    cosine = x @ reference / (x.norm() * reference.norm())
    return float(torch.rad2deg(torch.arccos(cosine.clamp(-1, 1))))


def same_state(a: Any, b: Any) -> bool:
    """True if nested dicts hold bitwise equal tensors and equal other values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
