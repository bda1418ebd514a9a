"""Checkpoints resume exactly, convert between formats, and are refused if they are damaged."""

from __future__ import annotations

import copy
import io
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.networks import assert_same_state, tensors
from support.numerics import METHODS, PAPER, relative_error, slow
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kronbit import CASPR, Shampoo

FAST: dict[str, Any] = {"update_every": 2, "refresh_every": 3}
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


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(130, 66)
        self.second = nn.Linear(66, 5)
        self.dead = nn.Linear(7, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def network(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Network:
    torch.manual_seed(0)
    return Network().to(device=device, dtype=dtype)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    p = next(model.parameters())
    for t in range(first, first + steps):
        x = torch.randn(16, 130, generator=torch.Generator().manual_seed(t)).to(p.device, p.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict after a round trip through a file, read with ``weights_only``."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=True)


def resume(
    build: Any, model: nn.Module, optimizer: Any, steps: int, first: int
) -> tuple[nn.Module, Any]:
    """Resume as a new process does: with the weights, a new optimizer and the checkpoint."""
    twin = copy.deepcopy(model)
    other = build(twin)
    other.load_state_dict(saved(optimizer))
    run(twin, other, steps, first)
    return twin, other


def assert_resumes(build: Any, device: torch.device | str, dtype: torch.dtype) -> None:
    model = network(device, dtype)
    optimizer = build(model)
    optimizer.train()
    run(model, optimizer, 4)  # past the first refresh, between two updates
    twin, other = resume(build, model, optimizer, 5, first=4)
    run(model, optimizer, 5, first=4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert_same_state(optimizer.state_dict()["state"], other.state_dict()["state"])


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


def damage(state: dict[str, Any], kind: str) -> str:
    """Damage a checkpoint and return a pattern of the expected message."""
    entry, groups = state["state"][0], state["param_groups"]
    left = entry["block_0"]["left"]
    if kind == "missing block":
        del entry["block_1"]
        return r"state\[0\]\['block_1'\] is missing.*max_order"
    if kind == "unknown block":
        entry["block_7"] = entry["block_0"]
        return r"state\[0\]\['block_7'\] does not exist here.*max_order"
    if kind == "missing side":
        del entry["block_0"]["right"]
        return r"state\[0\]\['block_0'\]\['right'\] is missing or not a dict"
    if kind == "missing tensor":
        del left["root_scales"]
        return r"state\[0\]\['block_0'\]\['left'\]\['root_scales'\] is missing"
    if kind == "truncated":
        left["codes"] = left["codes"][:-1]
        return r"\['left'\]\['codes'\] has shape \(65, 33\); expected \(66, 33\)"
    if kind == "dtype":
        left["codes"] = left["codes"].float()
        return r"\['left'\]\['codes'\] is torch.float32; expected a tensor of torch.uint8"
    if kind == "not a tensor":
        left["scales"] = [1.0]
        return r"\['left'\]\['scales'\] is list; expected a tensor"
    if kind == "nan":
        left["scales"][0, 0] = torch.nan
        return r"\['left'\]\['scales'\] holds non-finite values"
    if kind == "negative scale":
        left["scales"][0, 0] = -1.0
        return r"\['left'\]\['scales'\] holds negative values"
    if kind == "unknown tensor":
        left["extra"] = torch.zeros(3)
        return r"\['left'\]\['extra'\] is unknown; expected eigenvalues, codes"
    if kind == "base tensor missing":
        del entry["base"]["exp_avg_sq"]
        return r"state\[0\]\['base'\]\['exp_avg_sq'\] is missing: AdamW needs it"
    if kind == "base step missing":
        del entry["base"]["step"]
        return r"state\[0\]\['base'\]\['step'\] is missing: AdamW needs it"
    if kind == "unknown parameter":
        state["state"][77] = entry
        return r"state\[77\] belongs to no parameter"
    if kind == "no groups":
        del state["param_groups"]
        return "param_groups is missing: this is not a state dict"
    if kind == "no params":
        del groups[0]["params"]
        return r"param_groups\[0\]\['params'\] is missing"
    if kind == "base shape":
        entry["base"]["exp_avg"] = entry["base"]["exp_avg"][:-1]
        return r"state\[0\]\['base'\]\['exp_avg'\] has shape \(65, 130\); expected \(66, 130\)"
    if kind == "no base":
        del entry["base"]
        return r"state\[0\]\['base'\] is missing"
    if kind == "base kind":
        entry["base"] = 3
        return r"state\[0\]\['base'\] is int; expected a dict"
    if kind == "step":
        entry["step"] = -1
        return r"state\[0\]\['step'\] must be a whole number >= 0; got -1"
    if kind == "entry":
        state["state"][0] = None
        return r"state\[0\] is NoneType; expected a dict"
    if kind == "groups":
        groups.append(groups[0])
        return "has 2 param groups, the optimizer has 1"
    if kind == "group size":
        groups[0]["params"] = groups[0]["params"][:-1]
        return r"param_groups\[0\] has 5 parameters in the checkpoint and 6 in the optimizer"
    if kind == "later format":
        groups[0]["kronbit_format"] = 99
        return "kronbit_format=99; this version of kronbit reads formats 1 to 2"
    if kind == "bad options":
        groups[0]["bits"] = 5
        return "bits must be one of"
    assert kind == "other cut"
    groups[0]["max_order"] = 1200
    entry.clear()
    entry.update(step=4, base={}, block_0={"left": left, "right": left})
    return "expected|missing"


@pytest.mark.parametrize("fresh", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize(
    "kind",
    [
        "missing block",
        "unknown block",
        "missing side",
        "missing tensor",
        "truncated",
        "dtype",
        "not a tensor",
        "nan",
        "negative scale",
        "unknown tensor",
        "unknown parameter",
        "no groups",
        "no params",
        "base shape",
        "base tensor missing",
        "base step missing",
        "no base",
        "base kind",
        "step",
        "entry",
        "groups",
        "group size",
        "later format",
        "bad options",
        "other cut",
    ],
)
def test_damaged_state_is_refused_and_nothing_changes(kind: str, fresh: bool) -> None:
    state = small_checkpoint()
    message = damage(state, kind)
    assert_refused(state, message, fresh)


def small_checkpoint() -> Any:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, max_order=70, **PAPER, **FAST)
    run(model, optimizer, 4)
    return copy.deepcopy(saved(optimizer))


def assert_refused(state: Any, message: str, fresh: bool = False) -> None:
    twin = network()
    other = Shampoo(twin.parameters(), lr=3e-2, max_order=70, **PAPER, **FAST)
    reference_model = network()
    reference = Shampoo(reference_model.parameters(), lr=3e-2, max_order=70, **PAPER, **FAST)
    if not fresh:
        run(twin, other, 4)
        run(reference_model, reference, 4)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert_same_state(other.state_dict()["state"], reference.state_dict()["state"])
    run(twin, other, 4, first=4)
    run(reference_model, reference, 4, first=4)
    for p, q in zip(twin.parameters(), reference_model.parameters(), strict=True):
        assert torch.equal(p, q)


# Path of an entry in a state dict, its wrong value, and a pattern of the message.
WRONG_ENTRIES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("state",), None, "state is NoneType; expected a dict"),
    (("state",), [1], "state is list; expected a dict"),
    (("state", 0), torch.ones(3), r"state\[0\] is Tensor; expected a dict"),
    (("param_groups",), None, "param_groups is NoneType; expected a list"),
    (("param_groups", 0), "x", r"param_groups\[0\] is str; expected a dict"),
    (("param_groups", 0, "params"), None, r"\['params'\] must be a list of numbers or names"),
    (("param_groups", 0, "params", 0), [0], r"\['params'\] must be a list of numbers or names"),
    (("param_groups", 0, "lr"), float("nan"), r"\['lr'\] must be a number; got nan"),
    (("param_groups", 0, "lr"), float("inf"), r"\['lr'\] must be a finite number; got inf"),
    (("param_groups", 0, "lr"), None, r"\['lr'\] must be a finite number; got None"),
    (("param_groups", 0, "lr"), torch.ones(3), r"\['lr'\] must be a finite number; got tensor"),
    (("param_groups", 0, "betas"), (0.9,), r"\['betas'\] must have the length of \(0.9"),
    (("param_groups", 0, "update_every"), 2.5, r"param_groups\[0\]: update_every must"),
    (("param_groups", 0, "first_refresh"), "x", r"param_groups\[0\]: first_refresh must"),
    (("param_groups", 0, "lr"), torch.tensor(torch.nan), r"\['lr'\] must be a number; got tensor"),
    (("param_groups", 0, "lr"), "x", r"\['lr'\] must be a number, as 0.03 is; got 'x'"),
    (("param_groups", 0, "betas"), 3, r"\['betas'\] must be a sequence, as \(0.9.* got 3"),
    (("param_groups", 0, "betas"), (0.9, float("nan")), r"\['betas'\] must be a number; got \("),
    (("state", 0, "product_bits"), torch.ones(2), r"\['product_bits'\] must be one of"),
    (("state", 0, "product_bits"), "24", r"\['product_bits'\] must be one of"),
    (("state", 0, "block_0"), None, r"\['block_0'\] is NoneType; expected a dict"),
    (("state", 0, "block_0", "top"), {}, r"\['block_0'\]\['top'\] is unknown"),
    (("state", 0, "base", "exp_avg"), None, r"\['exp_avg'\] is NoneType; expected a tensor"),
    (("state", 0, "base", "exp_avg"), "a", r"\['exp_avg'\] is str; expected a tensor"),
    (("state", 0, "base", "step"), None, r"\['step'\] is NoneType; expected a tensor"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG_ENTRIES)
def test_wrong_entries_are_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    state = small_checkpoint()
    *parents, last = path
    reduce(getitem, parents, state)[last] = value
    assert_refused(state, message)


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("base", lambda t: t.to("meta"), "is on the meta device and has no data"),
        (
            "block_0",
            lambda t: t.to("meta"),
            "is on the meta device; expected a strided tensor with data",
        ),
        ("block_0", Tensor.to_sparse, "is torch.sparse_coo; expected a strided tensor with data"),
    ],
)
def test_tensors_without_data_are_refused(side: str, change: Any, message: str) -> None:
    state = small_checkpoint()
    leaves = state["state"][0][side]
    leaves = leaves if side == "base" else leaves["left"]
    leaves.update({name: change(value) for name, value in leaves.items()})
    assert_refused(state, message)


@pytest.mark.parametrize("kind", ["complex", "sparse", "numpy", "none"])
def test_unusual_state_of_torch_optimizers_loads(kind: str) -> None:
    """Complex vectors, sparse momentum, NumPy scalars and a missing momentum buffer load."""
    p = nn.Parameter(torch.randn(66, 40))
    q = nn.Parameter(torch.randn(5, dtype=torch.complex64 if kind == "complex" else None))
    table = nn.Parameter(torch.randn(9, 4))
    base = torch.optim.AdamW if kind in ("complex", "numpy") else torch.optim.SGD
    settings: Any = {} if base is torch.optim.AdamW else {"momentum": 0.9}

    def make() -> Any:
        rest = {"params": [q, table], "precondition": False}
        return Shampoo([{"params": [p]}, rest], base, lr=1e-2, **settings, **FAST)

    def grads() -> None:
        p.grad, q.grad, table.grad = torch.randn_like(p), torch.randn_like(q), torch.ones(9, 4)
        if kind == "sparse":
            table.grad = table.grad.to_sparse(1)

    optimizer = make()
    grads()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    entry = state["state"][0]
    if kind == "numpy":
        entry["base"]["step"] = np.float32(1.0)
        entry["step"], entry["product_bits"] = np.int64(1), np.int64(0)
    elif kind == "none":
        entry["base"]["momentum_buffer"] = None
    other = make()
    other.load_state_dict(state)
    assert other.state[p]["step"] == 1
    grads()
    other.step()


@pytest.mark.parametrize("names", [["a"], 5])
def test_too_few_parameter_names_are_refused_and_nothing_changes(names: Any) -> None:
    p = nn.Parameter(torch.randn(66, 40))
    optimizer = Shampoo([("weight", p), ("bias", nn.Parameter(torch.randn(3)))], lr=1e-2, **FAST)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(param_names=names, lr=0.7)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['param_names'\] must hold one name"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_state_of_the_base_that_overflowed_loads_with_a_warning() -> None:
    """Squares of float16 gradients overflow in AdamW. Like torch, kronbit loads that state."""
    p = nn.Parameter(torch.randn(66, 40, dtype=torch.float16))

    def make() -> Shampoo:
        return Shampoo([p], torch.optim.AdamW, lr=1e-2, eps=1e-4, **FAST)

    optimizer = make()
    p.grad = torch.full_like(p, 1e4)
    optimizer.step()
    assert torch.isinf(optimizer.state[p]["base"]["exp_avg_sq"]).any()
    other = make()
    with pytest.warns(RuntimeWarning, match=r"1 tensor.*state\[0\]\['base'\]\['exp_avg_sq'\]"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


class UnrelatedBase(torch.optim.Optimizer):
    """A base whose state has familiar names with other meanings."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("sum", torch.zeros_like(p)).sub_(p.grad.abs())
            self.state[p].update(step=-1, least=float("inf"), note=None)


def test_numbers_of_the_base_are_not_checked() -> None:
    p = nn.Parameter(torch.randn(66, 40))
    optimizer = Shampoo([p], UnrelatedBase, lr=1e-2, **FAST)
    p.grad = torch.randn(66, 40)
    optimizer.step()
    other = Shampoo([p], UnrelatedBase, lr=1e-2, **FAST)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[p]["base"]["least"] == float("inf")
    assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("state", [None, 5, [1]])
def test_only_a_dict_is_a_state_dict(state: Any) -> None:
    p = nn.Parameter(torch.randn(66, 40))
    with pytest.raises(ValueError, match="a state dict is a dict; got "):
        Shampoo([p], lr=1e-2).load_state_dict(state)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_checkpoint_of_a_plain_base_loads_into_the_base(stepped: bool) -> None:
    """If a run changes from AdamW to Shampoo, F keeps its state, and statistics start fresh."""
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model, base, 2)
    twin = copy.deepcopy(model)
    groups = [
        {"params": [twin.first.weight], "precondition": False},
        {"params": [p for p in twin.parameters() if p is not twin.first.weight]},
    ]
    optimizer = Shampoo(groups, lr=7.0, update_every=1, refresh_every=3)
    if stepped:
        for p in twin.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    plain = copy.deepcopy(base.state_dict())
    first, *others = plain["param_groups"][0]["params"]
    plain["param_groups"] = [
        {**plain["param_groups"][0], "params": [first]},
        {**plain["param_groups"][0], "params": others},
    ]
    optimizer.load_state_dict(plain)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert [group["precondition"] for group in optimizer.param_groups] == [False, True]
    twin.load_state_dict(model.state_dict())
    run(model, base, 2, first=2)
    run(twin, optimizer, 2, first=2)  # before the first refresh, both runs are equal
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[twin.second.weight]["step"] == 2
    assert optimizer.state[twin.second.weight]["base"]["step"] == 4
    optimizer.load_state_dict(saved(optimizer))


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


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("other_base", ["adagrad", "nadamw", "rmsprop", "schedulefree-adamw"])
def test_the_state_of_another_base_is_refused(other_base: str, fresh: bool) -> None:
    model, twin = network(), network()
    optimizer = Shampoo(model.parameters(), base="sgd", lr=1e-2)
    run(model, optimizer, 2)
    if other_base.startswith("schedulefree"):
        pytest.importorskip("schedulefree")
    other = Shampoo(twin.parameters(), base=other_base, lr=1e-2)
    other.train()
    if not fresh:
        run(twin, other, 1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"\['base'\]\['\w+'\] is missing: .* another base\?"):
        other.load_state_dict(saved(optimizer))
    assert_same_state(before["state"], other.state_dict()["state"])
    assert before["param_groups"] == other.state_dict()["param_groups"]
    run(twin, other, 2)


def test_a_base_that_fails_to_load_changes_nothing() -> None:
    class Picky(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            self.param_groups, self.state = [], {}
            raise RuntimeError("no")

    model = network()
    optimizer = Shampoo(Picky(model.parameters(), lr=1e-2))
    run(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="no"):
        optimizer.load_state_dict(saved(optimizer))
    assert_same_state(before["state"], optimizer.state_dict()["state"])
    assert before["param_groups"] == optimizer.state_dict()["param_groups"]


def test_state_of_a_wider_dtype_than_the_parameter_is_not_rounded() -> None:
    """A base may keep float32 momentum of bf16 parameters, which torch's loader would cast."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        if not state:
                            state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                        state["momentum"].mul_(0.9).add_(p.grad.float())
                        p.sub_((group["lr"] * state["momentum"]).to(p.dtype))

    assert_resumes(lambda m: Shampoo(Wide(m.parameters(), lr=1e-2), **FAST), "cpu", torch.bfloat16)


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


@pytest.mark.parametrize("remove", [True, False])
def test_state_of_a_parameter_left_to_the_base_may_be_replaced(remove: bool) -> None:
    w, b = nn.Parameter(torch.ones(64, 66)), nn.Parameter(torch.ones(9))
    optimizer = Shampoo([w, b], lr=0.1)
    for t in range(6):
        w.grad, b.grad = torch.randn(64, 66), torch.randn(9)
        if t == 3:
            if remove:
                del optimizer.state[b]
            else:
                optimizer.state[b] = copy.deepcopy(optimizer.state[b])
        optimizer.step()
    expected = 3 if remove else 6
    assert optimizer.state[b]["step"] == expected
    assert int(optimizer.state_dict()["state"][1]["base"]["step"]) == expected
    assert int(optimizer.base.state[b]["step"]) == expected


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
