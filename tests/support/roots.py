"""A small network, the roots that its optimizer stores, and exact roots in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kronbit.optimizer import SecondOrder

SCHEDULE: dict[str, Any] = {"update_every": 2, "refresh_every": 6, "first_refresh": 2}
CPU = torch.device("cpu")


ROOTS = 4  # L̂ and R̂ of two layers


def network(device: torch.device = CPU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 64), nn.Tanh(), nn.Linear(64, 48)).to(device)


def backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(96, 80).to(next(model.parameters()).device)
    (model(x) - x[:, :48].tanh()).square().mean().backward()


def stored_roots(optimizer: SecondOrder) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the block, the side and the value of every stored root."""
    names = dict(zip(*_params_and_names(optimizer), strict=True))
    assert optimizer._keeper.plan is not None
    for p, key, row, sides in optimizer._keeper.plan.blocks():
        for side, factors in sides.items():
            yield f"{names[p]} {key}", side, factors.roots(slice(row, row + 1))[0]


def _params_and_names(optimizer: SecondOrder) -> tuple[list[Tensor], list[str]]:
    groups = optimizer.param_groups
    return (
        [p for group in groups for p in group["params"]],
        [name for group in groups for name in group["param_names"]],
    )


def exact_root(A: Tensor, damping: float, p: int) -> Tensor:
    """Return the root in float64, by an inverse and square roots instead of powers of λ."""
    A = A.double()
    A = A + damping * torch.linalg.eigvalsh(A).max() * torch.eye(len(A), dtype=A.dtype)
    root = torch.linalg.inv(A)
    for _ in range(p.bit_length() - 1):
        lam, V = torch.linalg.eigh(root)
        root = (V * lam.sqrt()) @ V.mT
    return root
