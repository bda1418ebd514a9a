"""A sharded network, and comparisons of state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_flatten_with_path

OPTIONS: dict[str, Any] = {"lr": 0.01, "update_every": 2, "refresh_every": 4, "max_order": 64}


class Network(nn.Module):
    """A network with odd sizes, few rows, and frozen, dead and unused layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(70, 66), nn.Linear(66, 67)
        self.frozen, self.dead = nn.Linear(67, 67), nn.Linear(67, 64)
        self.unused, self.last = nn.Linear(67, 65), nn.Linear(67, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))
        # In bf16, FSDP2 requires that all layers are called.
        return self.last(torch.tanh(x)) + 0 * (self.dead(x).sum() + self.unused(x).sum())


def sharded(mesh: DeviceMesh, **options: Any) -> Network:
    model = Network()
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(ranks: list[Any]) -> DeviceMesh:
    names = ("copies", "shards")[2 - torch.tensor(ranks).ndim :]
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def give_gradients(model: nn.Module, t: int) -> None:
    """Set random gradients: not finite in some rows at step 3, zero in the dead layer."""
    generator = torch.Generator().manual_seed(t)
    for name, p in model.named_parameters():
        if not p.requires_grad or name.startswith("unused"):
            continue
        grad = torch.randn(p.shape, generator=generator) * (0 if name.startswith("dead") else 1)
        grad = grad.to(p.device)
        if t == 3 and name in ("second.weight", "last.bias"):
            grad[-1] = torch.inf
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def step(model: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
    give_gradients(model, t)
    optimizer.step()


def whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Assert that nested values are equal, and tensors bitwise."""
    a, b = (dict(tree_flatten_with_path(value)[0]) for value in (actual, expected))
    assert a.keys() == b.keys()
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key]
        assert equal, f"{where} {key}"
