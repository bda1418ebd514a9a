"""A small network with every kind of parameter; functions that train and compare it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Updates at 2, 4, 6, ... and refreshes at 4, 8, ...
FAST: dict[str, Any] = {"update_every": 2, "refresh_every": 4}


class Network(nn.Module):
    """Linear, convolution, norm, scalar and expert parameters, and layers without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 70, 3)
        self.norm = nn.BatchNorm2d(70)
        self.linear = nn.Linear(70, 65)
        self.experts = nn.Parameter(torch.randn(3, 65, 9) / 8)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.dead = nn.Linear(5, 66)
        self.frozen = nn.Linear(65, 67).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        h = self.linear(h).tanh() * self.scale
        return torch.einsum("bi,eij->bej", h, self.experts).sum((1, 2)) + self.empty.sum()


def network(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Network:
    torch.manual_seed(0)
    return Network().to(device=device, dtype=dtype)


def backward(model: nn.Module, seed: int) -> Tensor:
    p = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 6, 6, generator=generator).to(device=p.device, dtype=p.dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Run ``steps`` steps, numbered from ``first``. The data of a step depends on its number."""
    for t in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return all tensors of nested dicts, by path."""
    if isinstance(value, Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else ()
    return {k: t for key, item in items for k, t in tensors(item, f"{path}/{key}").items()}


def assert_same_state(left: Any, right: Any) -> None:
    """Check that two states have bitwise equal tensors at the same paths, and equal steps."""
    a, b = tensors(left), tensors(right)
    assert a.keys() == b.keys()
    for key, tensor in a.items():
        assert tensor.dtype == b[key].dtype, key
        assert torch.equal(tensor.cpu(), b[key].cpu()), key
    for key, entry in left.items():
        if isinstance(entry, dict) and "step" in entry:
            assert entry["step"] == right[key]["step"]
