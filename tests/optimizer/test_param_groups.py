"""Param groups: options per group, groups added later, freezing, schedules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import oracle
from support.networks import FAST, backward, network, run, same, weights
from support.numerics import relative_error
from torch import nn

from kronbit import Shampoo


def test_groups_added_later_train_like_groups_of_the_constructor() -> None:
    first, late = nn.Parameter(torch.ones(66, 64)), nn.Parameter(torch.ones(66, 64))
    alone = nn.Parameter(torch.ones(66, 64))
    optimizer = Shampoo([first], base="sgd", lr=0.1, **FAST)
    for _ in range(5):
        first.grad = torch.randn(66, 64)
        optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[first]["block_0"]["left"].items()}
    optimizer.add_param_group({"params": [late], "lr": 0.2, "bits": 8})
    assert optimizer.param_groups[1]["update_every"] == 2
    reference = Shampoo([alone], base="sgd", lr=0.2, bits=8, **FAST)
    for t in range(6):
        first.grad = torch.randn(66, 64)
        late.grad = torch.randn(66, 64)
        alone.grad = late.grad.clone()
        optimizer.step()
        reference.step()
        if t == 0:  # Step 6 of `first` updates its statistics and keeps its roots.
            after = optimizer.state[first]["block_0"]["left"]
            assert torch.equal(after["root_codes"], before["root_codes"])
            assert not torch.equal(after["codes"], before["codes"])
    assert torch.equal(late, alone)


def test_frozen_parameters_do_not_advance() -> None:
    model = nn.Sequential(nn.Linear(64, 66), nn.Linear(66, 64))
    model[0].requires_grad_(False)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    for t in range(12):
        if t == 4:
            model[0].requires_grad_(True)
        if t == 8:
            model[1].requires_grad_(False)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 8
    assert optimizer.state[model[1].weight]["step"] == 8
    assert set(optimizer.state[model[0].weight]) == {"step", "base", "block_0", "product_bits"}


def test_precondition_may_be_switched_on_later_but_not_off() -> None:
    p, q = nn.Parameter(torch.ones(64, 66)), nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo(torch.optim.SGD([p], lr=0.1), update_every=1, refresh_every=1)
    plain = torch.optim.SGD([q], lr=0.1)
    optimizer.param_groups[0]["precondition"] = False
    for t in range(4):
        p.grad, q.grad = (torch.full((64, 66), float(t)) for _ in range(2))
        optimizer.step()
        plain.step()
    assert torch.equal(p, q)
    optimizer.param_groups[0]["precondition"] = True
    p.grad = torch.randn(64, 66)
    optimizer.step()
    assert "block_0" in optimizer.state[p]
    optimizer.param_groups[0]["precondition"] = False
    with pytest.raises(ValueError, match="precondition was changed from True to False"):
        optimizer.step()


def test_numeric_options_of_groups_are_read_at_every_step() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=100)
    for t in range(4):
        if t == 2:
            optimizer.param_groups[0].update(update_every=3, refresh_every=3)
        p.grad = torch.randn(64, 66)
        before = p.grad.clone()
        optimizer.step()
        assert torch.equal(p.grad, before) == (t < 2)  # step 3 updates, refreshes and preconditions
    optimizer.param_groups[0]["beta"] = 2.0
    p.grad = torch.randn(64, 66)
    with pytest.raises(ValueError, match=r"beta must be a number in \[0, 1\]; got 2.0"):
        optimizer.step()


def test_storage_options_are_fixed_once_there_is_state() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([("weight", p)], base="sgd", lr=0.1)
    optimizer.param_groups[0]["bits"] = 8  # allowed before the first step
    p.grad = torch.randn(64, 66)
    optimizer.step()
    optimizer.param_groups[0]["bits"] = 4
    before = p.detach().clone()
    with pytest.raises(
        ValueError, match=r"group of weight: bits was changed from 8 to 4.*save state_dict"
    ):
        optimizer.step()
    assert torch.equal(p, before)


def test_groups_may_differ_in_numbers_within_one_stack() -> None:
    """Blocks of one shape share stacks even if the options of their parameters differ."""
    betas = [0.5, 0.9, 0.5]
    params = [nn.Parameter(torch.ones(128, 64)) for _ in betas]
    alone = [nn.Parameter(torch.ones(128, 64)) for _ in betas]
    groups = [{"params": [p], "beta": beta} for p, beta in zip(params, betas, strict=True)]
    together = Shampoo(groups, base="sgd", lr=0.1, **FAST)
    singles = [
        Shampoo([p], base="sgd", lr=0.1, beta=beta, **FAST)
        for p, beta in zip(alone, betas, strict=True)
    ]
    for _ in range(5):
        for p, q, single in zip(params, alone, singles, strict=True):
            q.grad = torch.randn(128, 64)
            p.grad = q.grad.clone()
            single.step()
        together.step()
    assert same([p.detach() for p in params], [p.detach() for p in alone])
    assert [group["blocks"] for group in together.diagnostics()["groups"]] == [3]


def test_experts_and_fused_projections_are_preconditioned_one_by_one() -> None:
    stacked, fused = nn.Parameter(torch.zeros(3, 20, 30)), nn.Parameter(torch.zeros(60, 30))
    grads = torch.randn(2, 3, 20, 30)
    groups = [
        {"params": [stacked], "batch_dims": 1},
        {"params": [fused], "split_sizes": (20, 20, 20)},
    ]
    every = {"update_every": 1, "refresh_every": 1}
    optimizer = Shampoo(groups, base="sgd", lr=1.0, momentum=0.0, method="eigen", **every)
    for grad in grads:
        stacked.grad, fused.grad = grad.clone(), grad.reshape(60, 30).clone()
        optimizer.step()
    # Each matrix has separate L and R, and all matrices share one grafting factor.
    roots = []
    for e in range(3):
        pair = [oracle.Factor(n, oracle.Options(bits=32), torch.float64) for n in (20, 30)]
        for grad in grads[:, e].double():
            pair[0].update(grad @ grad.T)
            pair[1].update(grad.T @ grad)
        for factor in pair:
            factor.refresh()
        roots.append([factor.inverse_root() for factor in pair])
    Ghat = torch.stack([L @ g @ R for (L, R), g in zip(roots, grads[1].double(), strict=True)])
    Gtilde = Ghat * grads[1].norm() / Ghat.norm()
    assert relative_error(stacked.grad, Gtilde) < 0.02
    assert relative_error(fused.grad, Gtilde.reshape(60, 30)) < 0.02
    assert torch.equal(stacked.detach().reshape(60, 30), fused.detach())


def test_param_groups_are_the_list_of_the_base() -> None:
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = Shampoo(base)
    assert optimizer.param_groups is base.param_groups
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is base.param_groups
    optimizer.param_groups = [dict(group, lr=0.0) for group in optimizer.param_groups]
    assert optimizer.param_groups is base.param_groups
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    assert len(base.param_groups) == 2
    before = weights(model)
    run(model, optimizer, 1)
    assert same(before, weights(model))


def test_groups_added_to_the_base_get_the_options() -> None:
    p, q = nn.Parameter(torch.ones(64, 66)), nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1, bits=8)
    optimizer.base.add_param_group({"params": [q]})
    p.grad, q.grad = torch.randn(64, 66), torch.randn(64, 66)
    optimizer.step()
    assert optimizer.param_groups[1]["bits"] == 8
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_swapped_parameters_are_looked_up_at_the_step() -> None:
    """Accelerate replaces the objects in a group's list of parameters."""
    old, new = nn.Parameter(torch.ones(64, 66)), nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([old], base="sgd", lr=0.1)
    optimizer.param_groups[0]["params"] = [new]
    new.grad = torch.randn(64, 66)
    optimizer.step()
    assert torch.equal(old, torch.ones(64, 66))
    assert not torch.equal(new, torch.ones(64, 66))


def test_options_that_do_not_fit_a_parameter_are_refused_at_once() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    with pytest.raises(ValueError, match=r"split_sizes \(3, 3\) sums to 6"):
        Shampoo([{"params": [p], "split_sizes": (3, 3)}], lr=0.1)
    optimizer = Shampoo([nn.Parameter(torch.ones(4, 4))], lr=0.1)
    with pytest.raises(ValueError, match=r"split_sizes"):
        optimizer.add_param_group({"params": p, "split_sizes": (3, 3)})
    with pytest.raises(TypeError, match="a param group must be a dict; got list"):
        optimizer.add_param_group([p])
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (q for q in [p])})
    assert optimizer.param_groups[1]["params"] == [p]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_learning_rate_schedulers_work_with_numbers_and_tensors(kind: Any) -> None:
    results = []
    for make in (torch.optim.AdamW, lambda ps, lr: Shampoo(torch.optim.AdamW(ps, lr=lr))):
        model = network()
        optimizer = make(model.parameters(), lr=kind(1e-2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for t in range(5):
            optimizer.zero_grad()
            backward(model, t)
            optimizer.step()
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 / 4)
        results.append(weights(model))
    assert same(*results)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(
        Shampoo(network().parameters(), lr=1e-2), max_lr=0.1, total_steps=10
    )
    assert one_cycle.optimizer.param_groups[0]["betas"][0] == pytest.approx(0.95)
