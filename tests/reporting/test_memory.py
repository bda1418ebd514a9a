"""Estimates equal the memory of the state, and the peak of a step stays in the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.allocations import Allocations
from support.numerics import PAPER, slow
from torch import Tensor, nn

from kronbit import CASPR, Shampoo, estimate_memory
from kronbit.blocks.batches import CONVERGED_ROOT, ROBUST_UPDATE, UPDATE, Cost
from kronbit.config import Config
from kronbit.factors import Batch, Factors
from kronbit.kernels import guard
from kronbit.reporting.memory import state_bytes

OPTIONS = [
    {"bits": 32},
    {"bits": 32, "method": "eigen"},
    {"bits": 8, **PAPER},
    {"bits": 6, **PAPER},
    {"bits": 4, **PAPER},
    {"bits": 3, **PAPER},
    {"bits": 4, "method": "naive", "storage": "paper"},
    {"bits": 4, "root_bits": 8, **PAPER},
    {"bits": 4, "storage": "paper"},
    {"bits": 4, "method": "eigen"},
    {"bits": 4, "method": "naive"},
    {"bits": 6, "root_bits": 4},
    {"bits": 3, "root_bits": 32},
    {"bits": 4, "max_order": 70, "split": "even"},
]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 66, 3), nn.BatchNorm2d(66), nn.Flatten(), nn.Linear(66, 130), nn.Linear(130, 5)
    )
    model[3].bias.requires_grad_(False)
    return model.to(dtype)


def stepped(model: nn.Module, **options: Any) -> Shampoo:
    optimizer = Shampoo((p for p in model.parameters() if p.requires_grad), **options)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    optimizer.train()
    optimizer.step()
    return optimizer


def sum_of_tensors(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(sum_of_tensors, value.values())) if isinstance(value, dict) else 0


@pytest.mark.parametrize(
    ("options", "attempt", "cost"),
    [
        (PAPER, 0, UPDATE),
        (PAPER, 1, ROBUST_UPDATE),
        ({"method": "eigen"}, 0, UPDATE),
        ({"storage": "paper"}, None, CONVERGED_ROOT),
        ({}, None, CONVERGED_ROOT),
    ],
)
def test_kernels_use_as_many_matrices_as_the_cost_of_a_row(
    options: dict[str, Any],
    attempt: int | None,
    cost: Cost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches do nothing here, so the test counts only the tensors around them."""
    pytest.importorskip("triton")
    from kronbit.kernels import cholesky, compact, evaluation, matmul, power, split
    from kronbit.kernels import quantization as quantiser

    for module in (cholesky, compact, evaluation, matmul, power, split, quantiser):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    k, n, config = 2, 1024, Config(**options)
    factors = Factors(n, k, config.format(n), config.damping, "cpu")
    monkeypatch.setattr(guard, "why_not", lambda device: None)
    trusted = torch.ones(k, dtype=torch.bool)
    batch = Batch([(factors, slice(0, k))])
    with Allocations() as used:
        if attempt is None:
            batch.refresh(config)
        else:
            batch.update(torch.zeros(k, n, n), trusted, config, attempt)
    matrices = used.peak / (4 * k * n**2)
    assert cost.square - 0.5 < matrices < cost.square + 0.1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_equals_the_memory_of_the_state(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = network(dtype)
    optimizer = stepped(model, lr=1e-2, **options)
    memory = optimizer.memory()
    assert memory == estimate_memory(model, **options)
    assert memory["total"] == sum(sum_of_tensors(entry) for entry in optimizer.state.values())
    assert memory["total"] == memory["statistics"] + memory["roots"] + memory["base"]


@pytest.mark.parametrize(
    "base",
    ["sgd", "adam", "nadamw", "adagrad", "rmsprop", "schedulefree-adamw", "schedulefree-sgd"],
)
def test_estimates_include_the_state_of_the_base(base: str) -> None:
    if base.startswith("schedulefree"):
        pytest.importorskip("schedulefree")
    model = network()
    optimizer = stepped(model, base=base, lr=1e-2)
    assert optimizer.memory() == estimate_memory(model, base=base, lr=1e-2)


def test_estimates_count_the_shared_tables_of_8_bit_adamw_once() -> None:
    pytest.importorskip("bitsandbytes")
    model = network()
    optimizer = stepped(model, base="adamw8bit", lr=1e-2)
    assert optimizer.memory() == estimate_memory(model, base="adamw8bit", lr=1e-2)


def test_estimates_of_shapes_allocate_nothing() -> None:
    llama_layer = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008), (4096,)]
    with Allocations() as used:
        memory = estimate_memory(llama_layer, dtype=torch.bfloat16, max_order=2048)
    assert memory["base"] == 2 * 2 * sum(torch.Size(s).numel() for s in llama_layer) + 4 * 8
    assert memory["statistics"] > 2**25
    assert used.peak < 2**12
    with pytest.raises(ValueError, match="bits"):
        estimate_memory(llama_layer, bits=5)
    with pytest.raises(TypeError, match="'lrr'"):
        estimate_memory(llama_layer, lrr=5)


@pytest.mark.parametrize(("bits", "block_size"), [(4, 64), (8, 256), (3, 64), (6, 128)])
def test_a_quantised_element_takes_bits_plus_scale(bits: int, block_size: int) -> None:
    """At 4 bits, 4 + 32/64 = 4.5 bits as in the paper, plus float32 eigenvalues and diagonals."""
    n = 1280
    memory = estimate_memory([(n, n)], bits=bits, block_size=block_size, max_order=n, **PAPER)
    quantised = n * n * (bits + 32 / block_size) / 8
    vector = n * 4
    assert memory["statistics"] == 2 * (quantised + vector)
    assert memory["roots"] == 2 * (quantised + vector)


def test_the_state_is_about_seven_times_smaller_than_at_32_bits() -> None:
    shapes = [(1200, 1200), (768, 3072), (384, 1536)]
    small, large = (
        estimate_memory(shapes, **options) for options in ({"bits": 4, **PAPER}, {"bits": 32})
    )
    ratio = (large["statistics"] + large["roots"]) / (small["statistics"] + small["roots"])
    assert 7.0 <= ratio <= 7.1


def test_estimates_skip_frozen_parameters() -> None:
    model = network()
    expected = estimate_memory(model)
    assert estimate_memory(model.parameters()) == expected
    assert estimate_memory(model.named_parameters()) == expected
    alone = estimate_memory(model, base=None)
    assert alone == {**expected, "base": 0, "total": expected["statistics"] + expected["roots"]}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (nn.Parameter(torch.ones(3, 3)), "got a single tensor"),
        ([{"params": []}], "expected a module, or a list of parameters or shapes"),
        ((64, 64), "expected a module, or a list of parameters or shapes; got 64"),
    ],
)
def test_estimates_refuse_other_arguments(argument: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        estimate_memory(argument)


def test_a_base_that_cannot_run_on_the_meta_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Adafactor' cannot be estimated.*base=None"):
        estimate_memory([(64, 64)], base="torch.optim.Adafactor")


def test_memory_before_the_first_step_is_zero() -> None:
    optimizer = Shampoo(network().parameters(), lr=1e-2)
    assert optimizer.memory() == {"statistics": 0, "roots": 0, "base": 0, "total": 0}


@pytest.mark.parametrize("make", [Shampoo, pytest.param(CASPR, marks=slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 32},
        {"bits": 4},
        pytest.param({"bits": 4, **PAPER}, marks=slow),
        pytest.param({"bits": 4, "method": "naive"}, marks=slow),
        *(pytest.param(options, marks=slow) for options in OPTIONS[1:-1]),
        pytest.param({**PAPER, "root": "schur_newton"}, marks=slow),
    ],
    ids=str,
)
def test_the_peak_stays_within_the_workspace(make: Any, options: dict[str, Any]) -> None:
    """Every kind of step stays within the limit, although gradients and stacks exceed it."""
    workspace = 2 * 2**20
    shapes = [(64, 64)] * 90 + [(64, 192)] * 30 + [(151, 100)] * 30 + [(300, 300)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(
        torch.optim.SGD(params, lr=0.0),
        workspace_mb=workspace / 2**20,
        max_order=200,
        update_every=2,
        refresh_every=4,
        **options,
    )
    total = sum(4 * p.numel() for p in params)
    assert total > 2 * workspace
    for t in range(1, 6):
        for p in params:
            p.grad = torch.randn_like(p)
        if t == 1:
            optimizer.step()  # allocates the state
            continue
        with Allocations() as used:
            optimizer.step()
        assert used.peak < 1.1 * workspace, t


@slow
def test_the_peak_stays_within_the_workspace_for_channels_last_convolutions() -> None:
    """Gradients of these convolutions are copied to matrices, a few at a time."""
    workspace = 2 * 2**20
    params = [
        nn.Parameter(torch.randn(32, 32, 3, 3).to(memory_format=torch.channels_last))
        for _ in range(120)
    ]
    assert sum(4 * p.numel() for p in params) > 2 * workspace
    optimizer = Shampoo(
        torch.optim.SGD(params, lr=0.0),
        workspace_mb=workspace / 2**20,
        max_order=96,
        update_every=2,
        refresh_every=2,
    )
    for t in range(4):
        for p in params:
            p.grad = torch.randn_like(p)
        with Allocations() as used:
            optimizer.step()
        assert t == 0 or used.peak < 1.1 * workspace, t


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 32},
        {"bits": 4, "method": "naive"},
        {"bits": 3, **PAPER},
        {"bits": 4, **PAPER},
        {"bits": 4, "method": "eigen"},
        {"bits": 8, "storage": "paper"},
        {"bits": 4, "offload_statistics": True},
        {"bits": 32, "offload_statistics": True},
    ],
    ids=str,
)
def test_the_peak_stays_within_the_workspace_on_the_gpu(options: dict[str, Any]) -> None:
    """The peak of CUDA's allocator includes the scratch memory of cuSOLVER."""
    workspace = 64 * 2**20
    shapes = [(512, 512)] * 30 + [(512, 256)] * 30 + [(300, 700)] * 10 + [(2000, 768)]
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    optimizer = Shampoo(
        torch.optim.SGD(params, lr=0.0),
        workspace_mb=workspace / 2**20,
        max_order=512,
        update_every=2,
        refresh_every=4,
        **options,
    )
    for t in range(1, 14):
        for p in params:
            p.grad = torch.randn_like(p)
        torch.cuda.synchronize()
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated() - rest
        if t > 4:  # the first steps allocate state and library workspaces
            assert peak < 1.1 * workspace, t


def test_state_bytes_of_the_layout_equal_those_of_the_stacks() -> None:
    optimizer = stepped(network(), lr=1e-2, max_order=70)
    for preconditioner in optimizer._keeper.plan.preconditioners.values():
        expected = [
            sum(state_bytes(member.blocking, member.config).values())
            for member in preconditioner.stacks.members
        ]
        actual = sum(
            sum_of_tensors(factors.tensors)
            for group in preconditioner.stacks.groups
            for factors in (group.left, group.right)
        )
        assert sum(expected) == actual
