"""4-bit Shampoo in torchtitan's optimizer container: build, train, save and load.

In the config of a torchtitan training, ``optimizer=shampoo4bit(lr=3e-4)`` replaces
``default_adamw(lr=3e-4)``; nothing else changes. This script builds the container directly, in one
process (needs ``torchtitan``)::

    python examples/torchtitan_container.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer

from kronbit.integrations.torchtitan import shampoo4bit


class Network(nn.Module):
    """A small network whose layers are named like those of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 64)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.output = nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layers(self.tok_embeddings(tokens)))
        return logits


def build() -> tuple[Network, OptimizersContainer]:
    """Build a network and its optimizer; embedding and head are left to AdamW."""
    torch.manual_seed(0)
    model = Network()
    often = {"first_refresh": 5, "update_every": 10, "refresh_every": 20}  # suits a short run
    config = shampoo4bit(lr=3e-3, left_to_base="tok_embeddings|output", **often)
    config.implementation = "for-loop"  # the default, "fused", is for GPUs
    return model, config.build(model_parts=[model])


def train(model: Network, optimizers: OptimizersContainer, first: int, last: int) -> float:
    """Train on counting from step ``first`` to ``last`` and return the last loss."""
    for step in range(first, last):
        tokens = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 50)
        loss.backward()
        optimizers.step()
    return loss.item()


def main() -> None:
    model, optimizers = build()
    print(f"after 20 steps: loss {train(model, optimizers, 0, 20):.3f}")
    # Keys are flat (state.layers.0.weight.block_0.left.codes), as distributed checkpoints need.
    torch.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, "titan.pt")
    saved = torch.load("titan.pt", weights_only=True)
    twin, resumed = build()
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    losses = train(model, optimizers, 20, 60), train(twin, resumed, 20, 60)
    print(f"after 60 steps: loss {losses[0]:.3f}; resumed from the checkpoint: {losses[1]:.3f}")
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    print(optimizers.optimizers[0].summary())  # type: ignore[attr-defined, unused-ignore]


if __name__ == "__main__":
    main()
