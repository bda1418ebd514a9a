"""How a run is executed: ranks, devices, and models that are sharded or replicated."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from kronbit.distributed.consolidation import consolidate_state_dict, load_consolidated
from kronbit.lab.errors import LabError
from kronbit.lab.recipe import Recipe
from kronbit.optimizer import SecondOrder

PARALLEL = ("none", "ddp", "fsdp2")


@dataclass(frozen=True)
class World:
    """This process among the ranks, and how it trains. Results should not depend on it."""

    parallel: str  # none, ddp or fsdp2
    device: torch.device
    rank: int = 0
    ranks: int = 1
    data: Path = Path("data")  # folder with downloaded data sets
    compile: bool = False  # compile the network with torch.compile
    graph: bool = False  # capture the forward and backward pass in a CUDA graph
    tensorboard: bool = False  # also write TensorBoard files

    @property
    def first(self) -> bool:
        """True on the rank that writes files and to the terminal."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.ranks > 1:
            dist.barrier()

    def agree_on(self, text: str) -> str:
        """Return the text of the first rank."""
        texts = [text]
        if self.ranks > 1:
            dist.broadcast_object_list(texts)
        return texts[0]

    def leave(self) -> None:
        """Leave the process group."""
        if self.parallel != "none":
            dist.destroy_process_group()

    def refuse_conflicts(self, recipe: Recipe) -> None:
        """Refuse settings that conflict with the device, the optimizer or each other.

        Raises:
            LabError: If two settings conflict.
        """
        fp16, graph, on_cpu = recipe.amp == "fp16", self.graph, self.device.type != "cuda"
        name = recipe.optimizer
        hooked = name in ("kfac", "adabk", "eva")
        skips_hooks = f"skips the hooks of layers that {name} needs"
        reasons = {
            "--amp fp16 needs a GPU: use --amp bf16 or --amp off on the CPU": fp16 and on_cpu,
            "--cuda-graph needs a CUDA device": graph and on_cpu,
            "--cuda-graph needs a single process": graph and self.parallel != "none",
            "--cuda-graph cannot be combined with --amp fp16": graph and fp16,
            "--cuda-graph cannot be combined with micro_batch": graph and recipe.micro_batch,
            f"--cuda-graph {skips_hooks}": graph and hooked,
            f"--compile {skips_hooks}": self.compile and hooked,
            "eva does not unscale the statistics of --amp fp16: use bf16": fp16 and name == "eva",
        }
        for reason, holds in reasons.items():
            if holds:
                raise LabError(reason)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Return a network that runs on all ranks, with the parameters of ``model``.

        FSDP2 shards each layer of the network separately, then the rest.
        """
        if self.parallel == "ddp":
            ids = [self.device.index] if self.device.type == "cuda" else None
            return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        if self.parallel == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.ranks,))
            for part in (*_layers(model), model):
                fully_shard(part, mesh=mesh)
        return model

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return weights and state as a single process has them. All ranks must call it."""
        state = {"model": model.state_dict()}
        if self.parallel != "none" and isinstance(optimizer, SecondOrder):
            state["optimizer"] = consolidate_state_dict(optimizer)
        else:
            state["optimizer"] = optimizer.state_dict()
        if self.parallel == "fsdp2":
            from torch.distributed.tensor import DTensor

            state = tree_map_only(DTensor, lambda x: x.full_tensor().cpu(), state)
        return state

    def load_whole_state(
        self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load the result of ``whole_state``, on any number of ranks."""
        if self.parallel == "fsdp2":
            from torch.distributed.checkpoint import state_dict

            options = state_dict.StateDictOptions(full_state_dict=True)
            state_dict.set_model_state_dict(model, dict(state["model"]), options=options)
        else:
            model.load_state_dict(state["model"])
        load_consolidated(optimizer, state["optimizer"])  # type: ignore[arg-type]  # any optimizer


class Votes:
    """Asks all ranks whether any of them wants to stop; the answer comes one step later.

    Because of this delay, no rank waits for its device, and on steps of usual length, none waits
    for other hosts.
    """

    def __init__(self, world: World) -> None:
        self._group = None if world.ranks == 1 else dist.new_group(backend="gloo")
        self._work: dist.Work | None = None
        self._votes = torch.tensor(0.0)

    def any_rank(self, wants: bool) -> bool:
        """Return the answer of the previous call; it is the same on all ranks. All must call it."""
        if self._group is None:
            return wants
        if self._work is not None:
            self._work.wait()
        wanted = bool(self._votes)
        self._votes = torch.tensor(float(wants))
        self._work = dist.all_reduce(self._votes, group=self._group, async_op=True)
        return wanted


def find_device(name: str | None) -> torch.device:
    """Return the named device; by default a GPU if there is one, else the CPU.

    Raises:
        LabError: If the device does not exist.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise LabError(f"--device must be cpu, cuda or cuda:N; got {name!r}")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LabError(
            f"--device {name}: torch sees no CUDA device here; leave --device out to use the CPU, "
            "or install a torch with CUDA"
        )
    if device.type == "cuda" and (device.index or 0) >= count:
        raise LabError(f"--device {name}: the last CUDA device is cuda:{count - 1}")
    return device


def join_world(parallel: str, device: str | None, **how: Any) -> World:
    """Join the process group of the ranks that ``torchrun`` started.

    ``how`` has other attributes of ``World``.

    Raises:
        LabError: If ``parallel`` and the way the process was started do not match.
    """
    if parallel not in PARALLEL:
        raise LabError(f"--parallel must be one of {', '.join(PARALLEL)}; got {parallel!r}")
    if parallel == "none":
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise LabError("several ranks were started: choose --parallel ddp or fsdp2")
        return World("none", find_device(device), **how)
    if "RANK" not in os.environ:
        raise LabError(
            f"--parallel {parallel} needs torchrun: "
            f"torchrun --nproc-per-node 2 -m kronbit train ... --parallel {parallel}"
        )
    local = find_device(device)
    if local.type == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if local.type == "cuda" else "gloo")
    return World(parallel, local, dist.get_rank(), dist.get_world_size(), **how)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with parameters in the outermost lists of layers."""
    layers: list[nn.Module] = []
    for child in model.children():
        listed = isinstance(child, (nn.ModuleList, nn.Sequential))
        layers += child.children() if listed else _layers(child)
    return [layer for layer in layers if any(True for _ in layer.parameters())]
