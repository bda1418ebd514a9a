"""Checkpoints resume exactly, and convert between numbers of bits, methods and storages."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import FAST, assert_resumes, network, run, saved
from support.networks import assert_same_state, tensors
from support.numerics import METHODS, PAPER, relative_error, slow
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kronbit import CASPR, Shampoo

BASES = [
    "sgd",
    "adam",
    "adamw",
    "nadamw",
    "adagrad",
    "rmsprop",
    "adamw8bit",
    "schedulefree-adamw",
    "schedulefree-sgd",
]
PACKAGES = {"adamw8bit": "bitsandbytes", "schedulefree": "schedulefree"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "bits"), METHODS)
@pytest.mark.parametrize("make", [Shampoo, pytest.param(CASPR, marks=slow)])
def test_resume_is_exact_for_every_method(
    make: Any, method: str, bits: int, dtype: torch.dtype, device: torch.device
) -> None:
    assert_resumes(
        lambda m: make(m.parameters(), lr=1e-2, method=method, bits=bits, **FAST), device, dtype
    )


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("method", ["eigen", "naive", "cholesky"])
def test_resume_is_exact_in_compact_storage(method: str, bits: int, device: torch.device) -> None:
    options = {"method": method, "bits": bits, "storage": "compact", **FAST}
    assert_resumes(lambda m: Shampoo(m.parameters(), lr=1e-2, **options), device, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [pytest.param(32, marks=slow), 4])
@pytest.mark.parametrize("base", BASES)
def test_resume_is_exact_for_every_base(
    base: str, bits: int, dtype: torch.dtype, device: torch.device
) -> None:
    for prefix, package in PACKAGES.items():
        if base.startswith(prefix):
            pytest.importorskip(package)
    assert_resumes(
        lambda m: Shampoo(m.parameters(), base=base, lr=1e-2, bits=bits, **FAST), device, dtype
    )


def test_resume_before_the_first_refresh_is_exact() -> None:
    """The resumed optimizer knows that no root has been refreshed."""
    assert_resumes(
        lambda m: Shampoo(m.parameters(), lr=1e-2, update_every=2, refresh_every=7),
        "cpu",
        torch.float32,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_checkpoints_move_between_cpu_and_cuda_bit_for_bit(method: str, bits: int) -> None:

    def build(m: nn.Module) -> Shampoo:
        return Shampoo(m.parameters(), lr=1e-2, method=method, bits=bits, **FAST)

    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        model = network(source)
        optimizer = build(model)
        run(model, optimizer, 4)
        other = build(network(target))
        other.load_state_dict(saved(optimizer))
        assert_same_state(optimizer.state_dict()["state"], other.state_dict()["state"])
        back = build(network(source))
        back.load_state_dict(saved(other))
        assert_same_state(optimizer.state_dict()["state"], back.state_dict()["state"])


def test_state_dict_is_plain_and_small() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 3)
    state = optimizer.state_dict()
    assert all(type(tensor) is Tensor for tensor in tensors(state["state"]).values())
    assert all(isinstance(entry["step"], int) for entry in state["state"].values())
    assert all(group["kronbit_format"] == 2 for group in state["param_groups"])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert buffer.tell() < 1.2 * optimizer.memory()["total"] + 20_000


def test_a_state_dict_without_state_loads_before_the_first_step() -> None:
    """Accelerate's `prepare` loads an optimizer's state dict before its first step."""
    plain, model = network(), network()
    run(plain, Shampoo(plain.parameters(), lr=1e-2, **FAST), 5)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state == {}
    run(model, optimizer, 5)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_numeric_options_come_from_the_checkpoint_and_storage_from_the_optimizer() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, beta=0.5, damping=1e-3, **FAST)
    run(model, optimizer, 3)
    other = Shampoo(network().parameters(), lr=7.0, bits=8, beta=0.9)
    other.load_state_dict(saved(optimizer))
    group = other.param_groups[0]
    assert (group["lr"], group["beta"], group["damping"], group["update_every"]) == (
        1e-2,
        0.5,
        1e-3,
        2,
    )
    assert group["bits"] == 8


@pytest.mark.parametrize(
    ("source", "target", "tolerance"),
    [
        ({"bits": 32}, {"bits": 4}, 0.2),
        ({"bits": 32}, {"bits": 8}, 0.02),
        ({"bits": 4}, {"bits": 32}, 1e-4),
        ({"bits": 4}, {"bits": 32, "method": "eigen"}, 1e-4),
        ({"bits": 4, "method": "naive"}, {"bits": 4}, 0.2),
        ({"bits": 4}, {"bits": 4, "method": "naive"}, 0.2),
        ({"bits": 4}, {"bits": 8}, 0.02),
        ({"bits": 8}, {"bits": 3}, 0.4),
        ({"bits": 4}, {"bits": 4, "mapping": "dt"}, 0.2),
        ({"bits": 4}, {"bits": 4, "block_size": 16}, 0.2),
        ({"bits": 4}, {"bits": 4, "root_bits": 8}, 0.01),
        ({"bits": 32}, {"bits": 8, "method": "cholesky", "storage": "compact"}, 0.02),
        ({"bits": 4}, {"bits": 8, "method": "cholesky"}, 0.02),
        ({"bits": 8, "method": "cholesky"}, {"bits": 32}, 1e-4),
        ({"bits": 4, "method": "cholesky", "storage": "compact"}, {"bits": 8}, 0.02),
        ({"bits": 4, "method": "cholesky"}, {"bits": 6, "method": "cholesky"}, 0.05),
        ({"bits": 4}, {"bits": 4, "storage": "compact"}, 0.2),
        ({"bits": 8, "exponent": -0.5}, {"bits": 8, "exponent": -0.5, "method": "cholesky"}, 0.02),
        ({"bits": 4, "storage": "compact"}, {"bits": 8}, 0.02),
        ({"bits": 4, "method": "naive", "storage": "compact"}, {"bits": 4, "method": "naive"}, 0.2),
    ],
    ids=str,
)
def test_other_bits_and_methods_are_converted(
    source: dict[str, Any], target: dict[str, Any], tolerance: float
) -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, damping=1e-3, **FAST, **source)
    run(model, optimizer, 7)
    twin = copy.deepcopy(model)
    other = Shampoo(twin.parameters(), lr=1e-2, damping=1e-3, **FAST, **target)
    other.load_state_dict(saved(optimizer))
    params = zip(model.parameters(), twin.parameters(), strict=True)
    for p, q in params:
        if p not in optimizer.state:  # the bias of a layer without gradients
            continue
        assert optimizer.state[p]["step"] == other.state[q]["step"]
        assert_same_state(optimizer.state[p]["base"], other.state[q]["base"])
    figures = [
        [
            (factors.method.matrix(factors.tensors), factors.roots(slice(0, factors.rows)))
            for preconditioner in o._keeper.plan.preconditioners.values()
            for group in preconditioner.stacks.groups
            for factors in (group.left, group.right)
        ]
        for o in (optimizer, other)
    ]
    for (A, root), (B, other_root) in zip(*figures, strict=True):
        assert relative_error(B, A) < tolerance
        assert relative_error(other_root, root) < tolerance
    # Training continues, and the first step is preconditioned.
    other.zero_grad()
    run(twin, other, 4, first=7)
    assert all(torch.isfinite(p).all() for p in twin.parameters())
    assert other.diagnostics()["groups"][0]["graft_ratio"] != (1.0, 1.0)


def test_conversion_to_the_same_format_is_the_identity() -> None:
    """Factors of small order are float32 at any number of bits, so their tensors do not change."""
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 4)
    other = Shampoo(network().parameters(), lr=1e-2, bits=8, **FAST)
    other.load_state_dict(saved(optimizer))
    small = optimizer.state_dict()["state"][2]["block_0"]["left"]
    assert small["factor"].shape == (5, 5)
    assert_same_state(small, other.state_dict()["state"][2]["block_0"]["left"])


@pytest.mark.parametrize("bits", [4, 32])
def test_format_1_defaults_to_the_papers_method(bits: int) -> None:
    model = network()
    options = {} if bits == 32 else PAPER
    optimizer = Shampoo(model.parameters(), lr=1e-2, bits=bits, **options, **FAST)
    run(model, optimizer, 4)
    state = copy.deepcopy(saved(optimizer))
    old = copy.deepcopy(state)
    for group in old["param_groups"]:
        group |= {"kronbit_format": 1, "method": None}
        del group["storage"], group["trace_scaling"]
    loaded = []
    for source in (state, old):
        other = Shampoo(network().parameters(), lr=1e-2, **FAST)
        other.load_state_dict(copy.deepcopy(source))
        loaded.append(other.state_dict())
    assert_same_state(loaded[0]["state"], loaded[1]["state"])
    assert loaded[1]["param_groups"] == loaded[0]["param_groups"]
    assert loaded[1]["param_groups"][0]["kronbit_format"] == 2


def test_after_a_change_of_max_order_only_the_base_state_is_kept() -> None:
    """The error for a changed `max_order` advises loading the base's state alone."""
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, max_order=70, **FAST)
    run(model, optimizer, 4)
    optimizer.param_groups[0]["max_order"] = 100
    with pytest.raises(ValueError, match=r"max_order was changed.*load base.state_dict\(\)"):
        run(model, optimizer, 1)
    other = Shampoo(model.parameters(), lr=1e-2, max_order=100, **FAST)
    other.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    assert other.param_groups[0]["max_order"] == 100
    assert other.state[model.first.weight]["step"] == 0
    run(model, other, 4)


def test_preconditioning_can_start_from_a_checkpoint_without_statistics() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, precondition=False)
    run(model, optimizer, 3)
    other = Shampoo(network().parameters(), lr=1e-2, method="eigen")
    other.load_state_dict(saved(optimizer))
    entry = other.state_dict()["state"][0]
    assert entry["step"] == 3
    assert torch.equal(
        entry["base"]["exp_avg"], optimizer.state_dict()["state"][0]["base"]["exp_avg"]
    )
    assert (entry["block_0"]["left"]["eigenvalues"] == 1e-6).all()
    switched_off = Shampoo(network().parameters(), lr=1e-2, precondition=False)
    with pytest.raises(ValueError, match=r"\['block_0'\] does not exist here.*precondition"):
        switched_off.load_state_dict(saved(other))


def test_parameters_missing_in_the_checkpoint_start_fresh_with_a_warning() -> None:
    model = network()
    model.second.weight.requires_grad_(False)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 4)
    state = saved(optimizer)
    twin = network()
    other = Shampoo(twin.named_parameters(), lr=1e-2, **FAST)
    with pytest.warns(RuntimeWarning, match=r"no state of 1 preconditioned.*second.weight: they"):
        other.load_state_dict(state)
    run(twin, other, 1, first=4)
    assert other.state[twin.second.weight]["step"] == 1
    assert other.state[twin.first.weight]["step"] == 5


def test_load_hooks_run() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2)
    run(model, optimizer, 1)
    calls = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("post"))
    optimizer.load_state_dict(state_dict=copy.deepcopy(optimizer.state_dict()))
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_round_trip(flat: bool, tmp_path: Path) -> None:
    """PyTorch creates the state by a step with zero gradients and lr=0, which changes no weight."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    # A layer without gradients has no state in torch's optimizers until that step.
    model = network()
    del model.dead
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 4)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)

    twin = copy.deepcopy(model)
    other = Shampoo(twin.parameters(), lr=1e-2, **FAST)
    empty = get_optimizer_state_dict(twin, other, options=options)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    dcp.load({"optimizer": empty}, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(twin, other, empty, options=options)
    run(model, optimizer, 5, first=4)
    run(twin, other, 5, first=4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_preconditioning_continues_after_a_change_of_the_schedule(
    device: torch.device,
) -> None:
    """The state, not the current intervals, decides which parameters are preconditioned."""
    p, q = (nn.Parameter(torch.ones(64, 66, device=device)) for _ in range(2))
    optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=1, refresh_every=3)
    for t in range(5):
        p.grad = torch.randn(64, 66, generator=torch.Generator().manual_seed(t)).to(device)
        if t == 4:
            optimizer.param_groups[0]["refresh_every"] = 500
        optimizer.step()
    resumed = Shampoo([q], base="sgd", lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 70, device=device))]})
    G = torch.randn(64, 66).to(device)
    for parameter, stepping in ((p, optimizer), (q, resumed)):
        parameter.grad = G.clone()
        stepping.step()
        assert not torch.equal(parameter.grad, G)
    assert torch.equal(p.grad, q.grad)


def test_without_product_bits_the_roots_decide_which_parameters_are_preconditioned() -> None:
    p, q = (nn.Parameter(torch.ones(64, 66)) for _ in range(2))
    optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=1, refresh_every=2)
    for steps, preconditioned in ((1, 0), (2, 24)):
        p.grad = torch.randn(64, 66)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["state"][0].pop("product_bits") == preconditioned
        resumed = Shampoo([q], base="sgd", lr=0.1)
        resumed.load_state_dict(saved)
        assert resumed.state[q]["product_bits"] == preconditioned, steps


def test_roots_of_another_exponent_are_converted() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, bits=32, damping=1e-3, **FAST)
    run(model, optimizer, 7)
    twin = copy.deepcopy(model)
    other = Shampoo(twin.parameters(), lr=1e-2, bits=32, exponent=-0.5, damping=1e-3, **FAST)
    other.load_state_dict(saved(optimizer))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for key, block in optimizer.state[p].items() if p in optimizer.state else ():
            if key.startswith("block"):
                for side, leaves in block.items():
                    converted, root = other.state[q][key][side], leaves["root"]
                    assert torch.equal(converted["matrix"], leaves["matrix"])
                    assert relative_error(converted["root"], root @ root) < 1e-5
