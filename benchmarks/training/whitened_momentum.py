"""Compare the updates of Muon and of AdamW with Shampoo, changing one property at a time.

Usage::

    OMP_NUM_THREADS=1 python benchmarks/training/whitened_momentum.py --seeds 2 --processes 2 \
        --output result.json

The recipe is pydoc-gpt (a small GPT on Python's reference, minutes on a CPU). Each row names the
optimizer of the hidden matrices. AdamW with the same learning rate trains all other parameters, as
is usual with Muon. "peak" measures how far a step is from orthogonal: its largest singular value,
divided by the root mean square of all its singular values.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit import Shampoo
from kronbit.lab.data import Setting, open_data
from kronbit.lab.models import build
from kronbit.lab.muon import hidden_matrices
from kronbit.lab.recipe import find_recipe
from kronbit.lab.schedules import factor
from kronbit.lab.training.measures import hardware, versions
from kronbit.lab.training.passes import Objective

DECAY, RMS, MU = 0.1, 0.2, 0.95  # weight decay; RMS of Muon's update at lr 1; its momentum
SELDOM = {"bits": 32, "update_every": 10, "refresh_every": 50, "first_refresh": 5}
OFTEN = {"bits": 32, "update_every": 2, "refresh_every": 10, "first_refresh": 5}
ALWAYS = {"bits": 32, "update_every": 1, "refresh_every": 1}
BETAS = (0.9, 0.95)
LOOK_EVERY = 20


class Momentum:
    """Replaces gradients by their Nesterov average, so that later stages see only the average."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.buffers = {p: torch.zeros_like(p) for p in params}

    def __call__(self) -> None:
        for p, buffer in self.buffers.items():
            assert p.grad is not None
            buffer.lerp_(p.grad, 1 - MU)
            p.grad.lerp_(buffer, MU)


def to_rms(tensors: Iterable[Tensor], rms: float) -> None:
    """Scale each tensor to the given root mean square."""
    for x in tensors:
        x.mul_(rms * x.numel() ** 0.5 / x.norm().clamp(min=1e-20))


def orthogonalised(G: Tensor) -> Tensor:
    """Apply Muon's five Newton-Schulz steps in float32: all singular values become nearly 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G if G.shape[0] <= G.shape[1] else G.T
    X = X / X.norm().clamp(min=1e-20)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X if G.shape[0] <= G.shape[1] else X.T


class NormalisedSGD(Optimizer):
    """p ← (1 - lr · decay) p - lr · u, where u has the root mean square of Muon's update.

    Args:
        params: Parameters.
        lr: Learning rate.
        momentum: True if u is a Nesterov average of gradients, False if it is the last gradient.
        orthogonal: True to make the singular values of u equal.
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


class Whitened:
    """Shampoo of gradients or of their momentum, and a step of fixed size.

    Args:
        params: Parameters.
        lr: Learning rate.
        momentum_first: True for Shampoo of the momentum, False for momentum of Shampoo.
        orthogonal: True to make the momentum after Shampoo orthogonal.
        options: Options of Shampoo.
    """

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        momentum_first: bool,
        orthogonal: bool = False,
        **options: Any,
    ) -> None:
        self.params = params
        self.momentum = Momentum(params) if momentum_first else None
        self.shampoo = Shampoo(
            params,
            base=NormalisedSGD,
            lr=lr,
            momentum=not momentum_first,
            orthogonal=orthogonal,
            **options,
        )
        self.param_groups = self.shampoo.param_groups

    @torch.no_grad()
    def step(self) -> None:
        if self.momentum is not None:
            self.momentum()
        # All steps have the same weight in the statistics.
        to_rms([p.grad for p in self.params if p.grad is not None], 1.0)
        self.shampoo.step()


def adamw(params: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=BETAS, weight_decay=DECAY)


def around_adamw(params: Any, lr: float, **options: Any) -> Optimizer:
    return Shampoo(params, lr=lr, betas=BETAS, weight_decay=DECAY, **options)


before_momentum = partial(Whitened, momentum_first=False)
of_momentum = partial(Whitened, momentum_first=True)

Maker = Callable[[list[Tensor], float], Any]
ROWS: dict[str, Maker] = {
    "AdamW": adamw,
    "AdamW + Shampoo": partial(around_adamw, **SELDOM),
    "AdamW + Shampoo, often": partial(around_adamw, **OFTEN),
    # The following rows take steps of a fixed size.
    "momentum": partial(NormalisedSGD, momentum=True),
    "Shampoo, then momentum": partial(before_momentum, **SELDOM),
    "momentum, then Shampoo": partial(of_momentum, **SELDOM),
    "momentum, then Shampoo, often": partial(of_momentum, **OFTEN),
    "momentum, then Shampoo, always": partial(of_momentum, **ALWAYS),
    "momentum, then 4-bit Shampoo, often": partial(of_momentum, **{**OFTEN, "bits": 4}),
    "orthogonal gradient": partial(NormalisedSGD, orthogonal=True),
    "orthogonal momentum (Muon)": partial(NormalisedSGD, momentum=True, orthogonal=True),
    "Shampoo, then orthogonal momentum": partial(before_momentum, orthogonal=True, **SELDOM),
    "Shampoo, then orthogonal momentum, often": partial(before_momentum, orthogonal=True, **OFTEN),
}


def train(row: str, lr: float, seed: int) -> dict[str, Any]:
    """Train as the lab's loop does, with the optimizer of a row."""
    recipe = find_recipe("pydoc-gpt").with_settings({"seed": seed})
    steps = recipe.steps or 0
    setting = Setting(Path("data"), recipe.batch, seed, torch.device("cpu"))
    data = open_data(recipe.data, setting)
    torch.manual_seed(seed)
    options = dict(recipe.model)
    model = build(options.pop("name"), **options)
    objective = Objective(classifies=False, amp="off")
    hidden = [p for _, p in hidden_matrices(model)]
    hidden_set = set(hidden)
    rest = [p for p in model.parameters() if p not in hidden_set]
    optimizers = [ROWS[row](hidden, lr), adamw(rest, lr)]
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
        "optimizer": row,
        "lr": lr,
        "seed": seed,
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
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--commit", default="", help="commit of the run")
    arguments = parser.parse_args()
    content: dict[str, Any] = {
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
        "commit": arguments.commit,
        "recipe": "pydoc-gpt",
        "runs": [],
    }
    cases = list(itertools.product(arguments.rows, arguments.rates, range(arguments.seeds)))
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for result in pool.map(train, *zip(*cases, strict=True)):
            content["runs"].append(result)
            print(
                f"{result['optimizer']:45} lr {result['lr']:<7g} seed {result['seed']}: "
                f"{result['loss']:.4f}, peak {result['peak']:.2f}",
                flush=True,
            )
            arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
