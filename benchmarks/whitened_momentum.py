"""Why Muon is ahead: what its update has that AdamW's with Shampoo has not, one thing at a time.

Usage::

    python benchmarks/whitened_momentum.py --output result.json [--seeds 2]

The recipe pydoc-gpt (a small GPT on Python's reference, CPU, minutes). Hidden matrices get the
optimizer of a row, everything else AdamW; the same learning rate for both, as with Muon. "peak" is
how far a step is from orthogonal: its largest singular value, over their root mean square.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit import Shampoo
from kronbit.lab.data import open_data
from kronbit.lab.models import build
from kronbit.lab.muon import hidden_matrices
from kronbit.lab.recipe import find_recipe
from kronbit.lab.schedules import factor
from kronbit.lab.training.measures import hardware, versions
from kronbit.lab.training.passes import Objective

DECAY, RMS, MU = 0.1, 0.2, 0.95  # of weights; of Muon's update, per lr; of its momentum
SELDOM = {"update_every": 10, "refresh_every": 50, "first_refresh": 10}
OFTEN = {"update_every": 2, "refresh_every": 10, "first_refresh": 5}
BETAS = (0.9, 0.95)
LOOK_EVERY = 20


class Momentum:
    """Nesterov's average of gradients, in their place: what comes after it sees no other."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.buffers = {p: torch.zeros_like(p) for p in params}

    def __call__(self) -> None:
        for p, buffer in self.buffers.items():
            assert p.grad is not None
            buffer.lerp_(p.grad, 1 - MU)
            p.grad.lerp_(buffer, MU)


def to_rms(tensors: Iterable[Tensor], rms: float) -> None:
    """Scale each to a root mean square."""
    for x in tensors:
        x.mul_(rms * x.numel() ** 0.5 / x.norm().clamp(min=1e-20))


def orthogonalised(G: Tensor) -> Tensor:
    """Muon's five Newton-Schulz steps: all singular values near 1. In float32, as CPUs like it."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G if G.shape[0] <= G.shape[1] else G.T
    X = X / X.norm().clamp(min=1e-20)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X if G.shape[0] <= G.shape[1] else X.T


class NormalisedSGD(Optimizer):
    """p ← (1 - lr · decay) p - lr · u, u scaled to Muon's size.

    Args:
        params: What is trained.
        lr: Learning rate.
        momentum: Whether u is an average of gradients, else the last one.
        orthogonal: Whether its singular values are made equal.
    """

    def __init__(
        self, params: Any, lr: float, momentum: bool = False, orthogonal: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr})
        every = [p for group in self.param_groups for p in group["params"]]
        self.momentum = Momentum(every) if momentum else None
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.momentum is not None:
            self.momentum()
        for group in self.param_groups:
            for p in group["params"]:
                if self.orthogonal:
                    p.grad.copy_(orthogonalised(p.grad))
                to_rms([p.grad], RMS)
                p.mul_(1 - group["lr"] * DECAY).add_(p.grad, alpha=-group["lr"])


class WhitenedMomentum:
    """Momentum first, then Shampoo of that, then a step of fixed size."""

    def __init__(self, params: list[Tensor], lr: float, **options: Any) -> None:
        self.momentum = Momentum(params)
        self.shampoo = Shampoo(params, base=NormalisedSGD, lr=lr, **options)
        self.param_groups = self.shampoo.param_groups

    @torch.no_grad()
    def step(self) -> None:
        self.momentum()
        to_rms([p.grad for p in self.momentum.buffers if p.grad is not None], 1.0)
        self.shampoo.step()


def adamw(params: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=BETAS, weight_decay=DECAY)


def around_adamw(params: Any, lr: float, **options: Any) -> Optimizer:
    return Shampoo(params, lr=lr, betas=BETAS, weight_decay=DECAY, **options)


def shampoo_first(params: Any, lr: float, orthogonal: bool = False, **options: Any) -> Optimizer:
    return Shampoo(
        params, base=NormalisedSGD, lr=lr, momentum=True, orthogonal=orthogonal, **options
    )


Maker = Callable[[list[Tensor], float], Any]
ROWS: dict[str, Maker] = {
    "AdamW": adamw,
    "AdamW + Shampoo": partial(around_adamw, bits=32, **SELDOM),
    "AdamW + Shampoo, often": partial(around_adamw, bits=32, **OFTEN),
    # All others take steps of a fixed size.
    "momentum": partial(NormalisedSGD, momentum=True),
    "Shampoo, then momentum": partial(shampoo_first, bits=32, **SELDOM),
    "momentum, then Shampoo": partial(WhitenedMomentum, bits=32, **SELDOM),
    "momentum, then Shampoo, often": partial(WhitenedMomentum, bits=32, **OFTEN),
    "momentum, then 4-bit Shampoo, often": partial(WhitenedMomentum, bits=4, **OFTEN),
    "orthogonal gradient": partial(NormalisedSGD, orthogonal=True),
    "orthogonal momentum (Muon)": partial(NormalisedSGD, momentum=True, orthogonal=True),
    "Shampoo, then orthogonal momentum": partial(shampoo_first, orthogonal=True, bits=32, **SELDOM),
    "Shampoo, then orthogonal momentum, often": partial(
        shampoo_first, orthogonal=True, bits=32, **OFTEN
    ),
}


def train(make: Maker, lr: float, seed: int) -> dict[str, float]:
    """The loop of the lab, but for the optimizer."""
    recipe = find_recipe("pydoc-gpt").with_settings({"seed": seed})
    steps = recipe.steps or 0
    data = open_data(
        recipe.data, Path("data"), batch=recipe.batch, seed=seed, device=torch.device("cpu")
    )
    torch.manual_seed(seed)
    options = dict(recipe.model)
    model = build(options.pop("name"), **options)
    objective = Objective(classifies=False, amp="off")
    hidden = [p for _, p in hidden_matrices(model)]
    own = set(hidden)
    rest = [p for p in model.parameters() if p not in own]
    optimizers = [make(hidden, lr), adamw(rest, lr)]
    losses, peaks = [], []
    for step in range(steps):
        rate = lr * factor(recipe.schedule, step, steps, round(recipe.warmup * steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        x, y = data.batch(step)
        model.zero_grad()
        loss = objective.loss(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or float("inf"))
        before = (
            [p.detach() * (1 - rate * DECAY) for p in hidden]
            if (step + 1) % LOOK_EVERY == 0
            else []
        )
        for optimizer in optimizers:
            optimizer.step()
        for p, old in zip(hidden, before, strict=bool(before)):
            values = torch.linalg.svdvals(p.detach() - old)
            peaks.append(float(values[0] / values.square().mean().sqrt()))
        losses.append(float(loss.detach()))
    total = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for number, (x, y) in enumerate(data.held_out()):
        if number < (recipe.eval_batches or number + 1):
            total += objective.judge(model, x, y)
    return {
        "loss": float(total[0] / total[2]),
        "train_loss": sum(losses[-20:]) / 20,
        "peak": sum(peaks) / len(peaks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 6e-3, 1.2e-2, 2.4e-2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    content: dict[str, Any] = {
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
        "recipe": "pydoc-gpt",
        "runs": [],
    }
    for name in arguments.rows:
        for lr in arguments.rates:
            for seed in range(arguments.seeds):
                found = train(ROWS[name], lr, seed)
                content["runs"].append({"optimizer": name, "lr": lr, "seed": seed, **found})
                print(f"{name:45} lr {lr:<7g} seed {seed}: {found['loss']:.4f}", flush=True)
                arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
