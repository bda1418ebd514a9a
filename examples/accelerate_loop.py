"""4-bit Shampoo in an Accelerate training loop, on scikit-learn's digits.

Run it in one process, or resume on several ranks (needs ``accelerate``)::

    python examples/accelerate_loop.py
    accelerate launch --num_processes 2 examples/accelerate_loop.py --resume

``prepare`` may come before or after the first step, and may replace all parameters, as for FSDP2.
Steps skipped by an fp16 scaler are not counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kronbit import Shampoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --out")
    arguments = parser.parse_args()

    accelerator = Accelerator(mixed_precision=arguments.precision, gradient_accumulation_steps=2)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = Shampoo(optimizer, first_refresh=5, update_every=10, refresh_every=20)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    if arguments.resume:
        accelerator.load_state(str(arguments.out))

    for epoch in range(arguments.epochs):
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # statistics see the clipped gradient
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    accelerator.save_state(str(arguments.out))
    accelerator.print(optimizer.summary())
    accelerator.end_training()


if __name__ == "__main__":
    main()
