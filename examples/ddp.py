"""4-bit Shampoo under DistributedDataParallel, on scikit-learn's digits.

Run two ranks on one machine, with or without GPUs::

    torchrun --nproc-per-node 2 examples/ddp.py

All ranks have the same gradients after the backward pass, so they take the same steps, and every
rank holds the complete state. Rank 0 saves it, and all ranks load it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronbit import Shampoo

TRAINED = 1400  # of 1797 images; the rest is held out


def save(path: Path, content: dict[str, object]) -> None:
    """Write to a temporary path and rename, so a crash cannot damage the last checkpoint."""
    temporary = path.with_suffix(".new")
    torch.save(content, temporary)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="loaded if it exists, written at the end")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    if on_gpu:
        torch.cuda.set_device(device)

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device) / 16
    y = torch.tensor(labels, device=device)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = Shampoo(optimizer, first_refresh=5, update_every=10, refresh_every=20)

    start = 0
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start, arguments.steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randperm(TRAINED, generator=generator)[:128][rank::world].to(device)
        loss = nn.functional.cross_entropy(parallel(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = 100 * (model(x[TRAINED:]).argmax(-1) == y[TRAINED:]).float().mean()
    if rank == 0:
        steps = f"steps {start} to {arguments.steps}"
        print(f"{world} ranks, {steps}: {accuracy:.1f} % held-out accuracy")
        if arguments.checkpoint is not None:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(arguments.checkpoint, {**states, "step": arguments.steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
