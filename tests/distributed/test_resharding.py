"""Checkpoints saved on some ranks load on another number of ranks."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.numerics import slow
from support.ranks import run_on_ranks
from support.shards import OPTIONS, Network, assert_same, mesh_of, sharded, step, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import kronbit
from kronbit import Shampoo
from kronbit.distributed.sharding import local

SAVED, ALL = 5, 9  # steps
# The ranks of each layout. Every rank holds some rows; in the layout "twice", each shard has two
# replicas. In the layout "plain", every rank holds everything.
LAYOUTS = {
    "four": [0, 1, 2, 3],
    "three": [0, 1, 2],
    "two": [0, 1],
    "one": [0],
    "twice": [[0, 1], [2, 3]],
}
NAMES = (*LAYOUTS, "plain")
FEW = [("four", "three"), ("three", "four"), ("plain", "two"), ("twice", "one"), ("two", "plain")]
PAIRS = [("four", name) for name in NAMES[1:]] + [(name, "four") for name in NAMES[1:]]
PAIRS += [("plain", "three"), ("three", "plain"), ("one", "plain"), ("twice", "two"), *FEW[2:]]


def ranks_of(layout: str) -> list[int]:
    return torch.tensor(LAYOUTS.get(layout, [0, 1, 2, 3])).flatten().tolist()


def build(mesh: DeviceMesh | None, **options: Any) -> tuple[nn.Module, Shampoo]:
    model = Network() if mesh is None else sharded(mesh)
    return model, Shampoo(model.parameters(), **{**OPTIONS, **options})


def save(model: nn.Module, optimizer: Shampoo, path: str, flat: bool, group: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    content = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(content, checkpoint_id=path, process_group=group)


def load(model: nn.Module, optimizer: Shampoo, path: str, flat: bool, group: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    content = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    # Layers without a gradient have no state in the base optimizer, and none in the checkpoint.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(content, checkpoint_id=path, process_group=group, planner=planner)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


def distributed_like(p: Tensor, value: Tensor) -> Tensor:
    """Return the value, sharded as the parameter is."""
    if not isinstance(p, DTensor):
        return value
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def steps(model: nn.Module, optimizer: Shampoo, first: int, last: int) -> None:
    for t in range(first, last + 1):
        step(model, optimizer, t)


def reshard(rank: int, folder: str, pairs: list[tuple[str, str]]) -> None:
    """Save in every layout, load in another one, and continue as one process does."""
    network = Network()
    steps(network, Shampoo(network.parameters(), process_group=False, **OPTIONS), 1, ALL)
    meshes = {layout: mesh_of(ranks) for layout, ranks in LAYOUTS.items()}  # collective
    groups = {layout: dist.new_group(ranks_of(layout)) for layout in NAMES}
    flat = {layout: number % 2 == 0 for number, layout in enumerate(NAMES)}
    for layout in NAMES:
        if rank in ranks_of(layout):
            model, optimizer = build(meshes.get(layout))
            steps(model, optimizer, 1, SAVED)
            save(model, optimizer, f"{folder}/{layout}", flat[layout], groups[layout])
        dist.barrier()
    for old, new in pairs:
        if rank in ranks_of(new):
            model, optimizer = build(meshes.get(new))
            load(model, optimizer, f"{folder}/{old}", flat[old], groups[new])
            steps(model, optimizer, SAVED + 1, ALL)
            for (name, p), q in zip(model.named_parameters(), network.parameters(), strict=True):
                assert torch.equal(whole(p), q), f"{old} -> {new}: {name}"
        dist.barrier()


@pytest.mark.parametrize("pairs", [FEW, pytest.param(PAIRS, marks=slow)], ids=["few", "all"])
def test_checkpoints_reshard(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    """Checkpoints of torch.distributed.checkpoint, nested or flat, resume bit-identically."""
    run_on_ranks(4, reshard, str(tmp_path), pairs)


def save_one_file(rank: int, folder: str, bits: int) -> None:
    """Save every layout to a file. Load each file in another layout, stored in ``bits`` bits."""
    network = Network()
    reference = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    steps(network, reference, 1, SAVED)
    expected = deepcopy(reference.state_dict())
    weights = deepcopy(network.state_dict())
    meshes = {layout: mesh_of(ranks) for layout, ranks in LAYOUTS.items()}
    layouts: list[tuple[str, dict[str, Any]]] = [(layout, {}) for layout in NAMES]
    layouts.append(("plain", {"shard_state": True}))
    for number, (layout, options) in enumerate(layouts):
        if rank in ranks_of(layout):
            model, optimizer = build(meshes.get(layout), **options)
            steps(model, optimizer, 1, SAVED)
            consolidated = kronbit.consolidate_state_dict(optimizer)
            assert bool(consolidated) == (rank == 0)
            if rank == 0:
                assert_same(consolidated, expected, layout)
                torch.save(consolidated, f"{folder}/{number}.pt")
        dist.barrier()
    network.load_state_dict(weights)
    reference = Shampoo(network.parameters(), process_group=False, **{**OPTIONS, "bits": bits})
    reference.load_state_dict(deepcopy(expected))  # F modifies the tensors it has loaded
    steps(network, reference, SAVED + 1, ALL)
    for number, (layout, options) in enumerate(layouts):
        if rank in ranks_of(layout):
            model, optimizer = build(meshes.get(layout), bits=bits, **options)
            for p, q in zip(model.parameters(), weights.values(), strict=True):
                local(p.data).copy_(local(distributed_like(p, q)))
            other = f"{folder}/{(number + 1) % len(layouts)}.pt"
            saved = torch.load(other, weights_only=True, mmap=True)
            kronbit.load_consolidated(optimizer, saved)
            steps(model, optimizer, SAVED + 1, ALL)
            for p, q in zip(model.parameters(), network.parameters(), strict=True):
                assert torch.equal(whole(p), q), f"{layout} {options} {bits}"
        dist.barrier()


@pytest.mark.parametrize("bits", [pytest.param(4, marks=slow), 8])
def test_one_file_holds_the_state_of_all_ranks(bits: int, tmp_path: Path) -> None:
    """The file is the state dict of one process, and loads on any number of ranks."""
    run_on_ranks(4, save_one_file, str(tmp_path), bits)
