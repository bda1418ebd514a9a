"""AdamW against 32-bit and 4-bit Shampoo, naive, the paper's and ours, on scikit-learn's digits.

Run by ``make demo``. Nothing is downloaded; it takes less than a minute on two CPU cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from kronbit import Shampoo

STEPS, BATCH, LR, SEEDS = 400, 128, 3e-3, (0, 1, 2)
TRAINED = 1400  # of 1797 images; the others are held out

# With the paper's T2 = 500 a run of 400 steps would be AdamW's. `first_refresh` brings the first
# preconditioned step forward; shorter intervals suit a shorter run.
SCHEDULE = {"first_refresh": 5, "update_every": 10, "refresh_every": 20}

Params = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR),
    "+ 32-bit Shampoo": lambda params: Shampoo(params, lr=LR, bits=32, **SCHEDULE),
    "+ 4-bit naive": lambda params: Shampoo(
        params, lr=LR, bits=4, method="naive", storage="paper", **SCHEDULE
    ),
    "+ 4-bit Shampoo (paper)": lambda params: Shampoo(
        params, lr=LR, bits=4, method="eigen", storage="paper", **SCHEDULE
    ),
    "+ 4-bit Shampoo": lambda params: Shampoo(params, lr=LR, bits=4, **SCHEDULE),
}


@dataclass
class Result:
    train_loss: float
    held_out_loss: float
    accuracy: float
    milliseconds: float
    state_bytes: int


def run(make: Callable[[Params], torch.optim.Optimizer], seed: int) -> Result:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(images).float() / 16)[order], torch.tensor(labels)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / STEPS)
    start = time.perf_counter()
    for _ in range(STEPS):
        batch = torch.randint(0, TRAINED, (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        train, held_out = model(x[:TRAINED]), model(x[TRAINED:])
        losses = [
            nn.functional.cross_entropy(logits, target).item()
            for logits, target in ((train, y[:TRAINED]), (held_out, y[TRAINED:]))
        ]
        accuracy = (held_out.argmax(1) == y[TRAINED:]).float().mean().item()
    held = optimizer.memory() if isinstance(optimizer, Shampoo) else {"statistics": 0, "roots": 0}
    return Result(*losses, accuracy, 1e3 * seconds / STEPS, held["statistics"] + held["roots"])


def main() -> None:
    console = Console()
    work = [(name, make, seed) for name, make in OPTIMIZERS.items() for seed in SEEDS]
    results: dict[str, list[Result]] = {name: [] for name in OPTIMIZERS}
    for name, make, seed in track(work, "training", console=console, transient=True):
        results[name].append(run(make, seed))

    table = Table(
        title=f"digits, {STEPS} steps, mean of {len(SEEDS)} seeds (± largest deviation);\n"
        "state: what the second order adds to AdamW's own",
        title_justify="left",
    )
    table.add_column("optimizer\n", no_wrap=True)
    for column in ("train\nloss", "held-out\nloss", "accuracy\n", "state\nKiB", "ms per\nstep"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, runs in results.items():
        losses = [result.held_out_loss for result in runs]
        mean = statistics.mean(losses)
        spread = max(abs(loss - mean) for loss in losses)
        table.add_row(
            name,
            f"{statistics.mean(result.train_loss for result in runs):.4f}",
            f"{mean:.3f} ± {spread:.3f}",
            f"{100 * statistics.mean(result.accuracy for result in runs):.1f} %",
            f"{runs[0].state_bytes / 1024:,.0f}",
            f"{statistics.median(result.milliseconds for result in runs):.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
