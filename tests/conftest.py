"""Fixtures and named tolerances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes it runs on the CPU, and on a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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


def train(
    optimizer: torch.optim.Optimizer, grads: Callable[[int], list[Tensor | None]], steps: int
) -> None:
    """Feed given gradients: step t gets ``grads(t)``, one per parameter in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for t in range(steps):
        for p, grad in zip(params, grads(t), strict=True):
            p.grad = None if grad is None else grad.to(p.dtype).to(p.device)
        optimizer.step()
