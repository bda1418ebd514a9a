"""Statistics in host memory give the same results as statistics on the device."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from torch import nn

from kronbit import Shampoo
from kronbit.factors import is_root
from kronbit.state.binding import blocks_of

OPTIONS = [
    {"bits": 4, "method": "eigen", "storage": "paper"},
    {"bits": 4, "method": "eigen"},
    {"bits": 4},
    {"bits": 32},
    {"bits": 4, "stagger": True},
]


def trained(
    device: torch.device, steps: int = 9, start: Any = None, **options: Any
) -> tuple[list[nn.Parameter], Shampoo]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 96), (96, 70), (96, 130), (6, 9), (70, 96)]
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    every = {"update_every": 2, "refresh_every": 4, "max_order": 100}
    optimizer = Shampoo(params, base="sgd", lr=0.01, **every, **options)
    if start is not None:
        optimizer.load_state_dict(start)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_offloaded_statistics_are_bitwise_equal(
    options: dict[str, Any], device: torch.device
) -> None:
    params, plain = trained(device, **options)
    others, offloaded = trained(device, offload_statistics=True, **options)
    for p, other in zip(params, others, strict=True):
        assert torch.equal(p, other)
        for block in blocks_of(offloaded.state[other]).values():
            for leaves in block.values():
                for name, leaf in leaves.items():
                    assert leaf.device.type == (device.type if is_root(name) else "cpu")
                    assert is_root(name) or leaf.is_pinned() == (device.type == "cuda")
    assert offloaded.memory() == plain.memory()
    states = plain.state_dict()["state"], offloaded.state_dict()["state"]
    on_host = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, states)
    assert_same_state(*on_host)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_checkpoint_loads_with_and_without_offloading(
    before: bool, after: bool, device: torch.device
) -> None:
    _, first = trained(device, offload_statistics=before)
    saved = first.state_dict()
    expected, _ = trained(device, start=copy.deepcopy(saved))
    params, optimizer = trained(device, start=copy.deepcopy(saved), offload_statistics=after)
    for p, other in zip(expected, params, strict=True):
        assert torch.equal(p, other)
    twin = copy.deepcopy(optimizer)  # copies are not in pinned memory
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step()


def test_a_checkpoint_is_converted_when_loaded_with_offloading(device: torch.device) -> None:
    _, first = trained(device, bits=8, method="eigen")
    saved = first.state_dict()
    options = {"bits": 4, "trace_scaling": True}
    expected, _ = trained(device, start=copy.deepcopy(saved), **options)
    params, _ = trained(device, start=copy.deepcopy(saved), offload_statistics=True, **options)
    for p, other in zip(expected, params, strict=True):
        assert torch.equal(p, other)


@pytest.mark.gpu
def test_the_gpu_holds_only_the_roots() -> None:
    allocated = {}
    for offload in (False, True):
        gc.collect()  # otherwise an earlier test's memory may be freed in between
        before = torch.cuda.memory_allocated()
        p = nn.Parameter(torch.zeros(2048, 2048, device="cuda"))
        p.grad = torch.randn_like(p)
        optimizer = Shampoo([p], base="sgd", lr=0.1, max_order=1024, offload_statistics=offload)
        optimizer.step()
        allocated[offload] = torch.cuda.memory_allocated() - before
        memory = optimizer.memory()
        del p, optimizer
    assert allocated[False] - allocated[True] == pytest.approx(memory["statistics"], rel=0.02)


def test_offloading_is_an_option_of_the_whole_optimizer() -> None:
    p = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="offload_statistics applies to the whole optimizer"):
        Shampoo([{"params": [p], "offload_statistics": True}], lr=0.1)
    with pytest.raises(ValueError, match="offload_statistics must be one of"):
        Shampoo([p], lr=0.1, offload_statistics="yes")
