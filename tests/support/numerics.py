"""Named tolerances, random matrices, and the configurations that many tests go through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

# The paper's own way to keep a preconditioner; the default is another one.
PAPER: dict[str, Any] = {"method": "eigen", "storage": "paper"}
# Every way to keep a preconditioner, with every number of bits that it takes.
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


# For tests and cases that take long on a CPU, mostly since kernels are interpreted there, and that
# others stand for: a GPU takes all of them.
slow = pytest.mark.slow


@contextmanager
def no_host_sync() -> Iterator[None]:
    """An error for whatever waits for the GPU inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def orthogonal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random orthogonal matrices."""
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype)


def spd(k: int, n: int, condition: float) -> Tensor:
    """Random symmetric positive definite matrices in float64, eigenvalues spaced in logarithm."""
    U = orthogonal(k, n, n)
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n).double()
    return (U * spectrum) @ U.mT


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x - reference‖ / ‖reference‖ in float64."""
    x, reference = x.detach().cpu().double(), reference.detach().cpu().double()
    return float((x - reference).norm() / reference.norm())


def angle(x: Tensor, reference: Tensor) -> float:
    """Degrees between two tensors."""
    x, reference = x.detach().cpu().double().flatten(), reference.detach().cpu().double().flatten()
    cosine = x @ reference / (x.norm() * reference.norm())
    return float(torch.rad2deg(torch.arccos(cosine.clamp(-1, 1))))


def same_state(a: Any, b: Any) -> bool:
    """Whether nested dicts hold the same tensors, to the bit, and the same other values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
