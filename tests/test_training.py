"""A small real training: 4 bits end where 32 bits do, and that is not where AdamW ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from sklearn.datasets import load_digits
from torch import nn

from kronbit import Shampoo

STEPS, SEEDS = 300, (0, 1, 2)


def held_out_loss(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], seed: int
) -> float:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(images).float() / 16)[order], torch.tensor(labels)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    model.append(nn.Linear(128, 10))
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / STEPS)
    for _ in range(STEPS):
        batch = torch.randint(0, 1400, (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x[1400:]), y[1400:]).item()


def test_4_bits_end_within_noise_of_32_bits_and_both_beyond_adamw() -> None:
    def shampoo(bits: int) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
        return lambda params: Shampoo(
            params, lr=3e-3, bits=bits, first_refresh=5, update_every=10, refresh_every=20
        )

    runs = {
        "adamw": [held_out_loss(lambda p: torch.optim.AdamW(p, lr=3e-3), s) for s in SEEDS],
        32: [held_out_loss(shampoo(32), s) for s in SEEDS],
        4: [held_out_loss(shampoo(4), s) for s in SEEDS],
    }
    mean = {name: sum(losses) / len(losses) for name, losses in runs.items()}
    noise = max(max(losses) - min(losses) for losses in runs.values())
    assert abs(mean[4] - mean[32]) < noise
    # paired by seed: both beat AdamW with every one of them
    for ours in (32, 4):
        assert all(a < b for a, b in zip(runs[ours], runs["adamw"], strict=True))
