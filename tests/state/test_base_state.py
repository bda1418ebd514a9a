"""The state of F in checkpoints: unusual entries load, and the state of another base is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import FAST, assert_resumes, network, run, saved
from support.networks import assert_same_state
from torch import nn

from kronbit import Shampoo


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
