"""A small network, and round trips of its optimizer through a file."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from support.networks import assert_same_state
from torch import Tensor, nn

FAST: dict[str, Any] = {"update_every": 2, "refresh_every": 3}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(130, 66)
        self.second = nn.Linear(66, 5)
        self.dead = nn.Linear(7, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def network(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Network:
    torch.manual_seed(0)
    return Network().to(device=device, dtype=dtype)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    p = next(model.parameters())
    for t in range(first, first + steps):
        x = torch.randn(16, 130, generator=torch.Generator().manual_seed(t)).to(p.device, p.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict after a round trip through a file, read with ``weights_only``."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=True)


def resume(
    build: Any, model: nn.Module, optimizer: Any, steps: int, first: int
) -> tuple[nn.Module, Any]:
    """Resume as a new process does: with the weights, a new optimizer and the checkpoint."""
    twin = copy.deepcopy(model)
    other = build(twin)
    other.load_state_dict(saved(optimizer))
    run(twin, other, steps, first)
    return twin, other


def assert_resumes(build: Any, device: torch.device | str, dtype: torch.dtype) -> None:
    model = network(device, dtype)
    optimizer = build(model)
    optimizer.train()
    run(model, optimizer, 4)  # past the first refresh, between two updates
    twin, other = resume(build, model, optimizer, 5, first=4)
    run(model, optimizer, 5, first=4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert_same_state(optimizer.state_dict()["state"], other.state_dict()["state"])
