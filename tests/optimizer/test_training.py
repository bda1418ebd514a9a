"""A small training run: 4 bits reach the loss of 32 bits, which is below that of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from support.numerics import PAPER, slow
from torch import nn

from kronbit import KFAC, AdaBK, Shampoo

STEPS, SEEDS = 300, (0, 1, 2)


def held_out_loss(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> float:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(images).float() / 16)[order], torch.tensor(labels)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    model.append(nn.Linear(128, 10))
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / STEPS)
    for _ in range(STEPS):
        batch = torch.randint(0, 1400, (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x[1400:]), y[1400:]).item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@cache
def shampoo_losses(**options: Any) -> list[float]:
    every = {"first_refresh": 5, "update_every": 10, "refresh_every": 20}
    return [
        held_out_loss(lambda model: Shampoo(model.parameters(), lr=3e-3, **every, **options), s)
        for s in SEEDS
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        pytest.param({"bits": 4, **PAPER}, marks=slow),
        pytest.param({"bits": 6, "root_bits": 4}, marks=slow),
    ],
    ids=str,
)
def test_4_bits_match_32_bits_within_noise_and_beat_adamw(options: dict[str, Any]) -> None:
    runs = {
        "adamw": [held_out_loss(adamw, s) for s in SEEDS],
        "32": shampoo_losses(bits=32),
        "shampoo": shampoo_losses(**options),
    }
    mean = {name: sum(losses) / len(losses) for name, losses in runs.items()}
    noise = max(max(losses) - min(losses) for losses in runs.values())
    assert abs(mean["shampoo"] - mean["32"]) < noise
    assert mean["shampoo"] < mean["adamw"]
    # 32 bits beat AdamW with every seed
    assert all(a < b for a, b in zip(runs["32"], runs["adamw"], strict=True))


@slow
@pytest.mark.parametrize("kind", [KFAC, AdaBK])
def test_4_bit_statistics_of_layers_match_32_bits_within_noise(kind: type[KFAC]) -> None:
    def around_sgd(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        every = {"first_refresh": 5, "update_every": 10, "refresh_every": 20}
        return lambda model: kind(
            model.parameters(), model=model, base="sgd", lr=0.1, **every, **options
        )

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    runs = {
        "sgd": [held_out_loss(sgd, s) for s in SEEDS],
        "32": [held_out_loss(around_sgd(bits=32), s) for s in SEEDS],
        "4": [held_out_loss(around_sgd(bits=4), s) for s in SEEDS],
    }
    mean = {name: sum(losses) / len(losses) for name, losses in runs.items()}
    noise = max(max(losses) - min(losses) for losses in runs.values())
    assert abs(mean["4"] - mean["32"]) < noise
    assert all(a < b for a, b in zip(runs["4"], runs["sgd"], strict=True))
