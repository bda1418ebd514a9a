"""4-bit Shampoo on sharded parameters (FSDP2), with checkpoints that load on any number of ranks.

Run two ranks on one machine, with or without GPUs, and resume with another number of ranks::

    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoint digits --steps 100
    torchrun --nproc-per-node 3 examples/fsdp2.py --checkpoint digits --steps 200

Each matrix has one owner, the rank that holds its second-order state and preconditions its
gradient. The state is thus divided among ranks, and results are those of a single process.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from kronbit import Shampoo

TRAINED = 1400  # of 1797 images; the rest is held out


class Training:
    """The content of a checkpoint: weights, state of the optimizer, and the step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


def save(folder: Path, training: Training) -> None:
    """Write to a temporary path and rename, so a crash cannot damage the last checkpoint."""
    temporary, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    dcp.save({"training": training}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(folder: Path, training: Training) -> None:
    """Load the last checkpoint, if there is one."""
    for path in (folder, folder.with_suffix(".old")):
        if path.exists():
            dcp.load({"training": training}, checkpoint_id=path)
            return


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
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = Shampoo(optimizer, first_refresh=5, update_every=10, refresh_every=20)

    training = Training(model, optimizer)
    if arguments.checkpoint is not None:
        load(arguments.checkpoint, training)
    start = training.step
    while training.step < arguments.steps:
        generator = torch.Generator().manual_seed(training.step)
        batch = torch.randperm(TRAINED, generator=generator)[:120][rank::world].to(device)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.step += 1
    with torch.no_grad():
        accuracy = 100 * (model(x[TRAINED:]).argmax(-1) == y[TRAINED:]).float().mean()
    if rank == 0:
        steps = f"steps {start} to {arguments.steps}"
        print(f"{world} ranks, {steps}: {accuracy:.1f} % held-out accuracy")
    if arguments.checkpoint is not None:
        save(arguments.checkpoint, training)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
