"""State of the whole optimizer: keys, copies, resets, replaced tensors, freed memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import defaultdict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.layers import sgd
from support.networks import FAST, assert_same_state, backward, network, run, same, weights
from torch import nn

from kronbit import KFAC, Shampoo
from kronbit.factors import Factors
from kronbit.state.binding import blocks_of


def test_blocks_of_one_shape_share_one_tensor() -> None:
    params = [nn.Parameter(torch.randn(128, 64)) for _ in range(3)]
    params.append(nn.Parameter(torch.randn(64, 64)))
    optimizer = Shampoo(params, lr=0.1, max_order=64)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    codes = [
        block["left"]["codes"]
        for p in params
        for key, block in optimizer.state[p].items()
        if key.startswith("block")
    ]
    assert len(codes) == 7
    assert len({leaf.untyped_storage().data_ptr() for leaf in codes}) == 1


def test_state_keys_are_the_documented_ones() -> None:
    expected = {
        ("eigen", 4): [
            "eigenvalues",
            "codes",
            "scales",
            "root_diagonal",
            "root_codes",
            "root_scales",
        ],
        ("naive", 4): ["diagonal", "codes", "scales", "root_diagonal", "root_codes", "root_scales"],
        ("dense", 32): ["matrix", "root"],
        ("eigen", 32): ["eigenvalues", "eigenvectors", "root"],
        ("cholesky", 4): [
            "diagonal",
            "codes",
            "scales",
            "root_diagonal",
            "root_codes",
            "root_scales",
        ],
        ("cholesky", 32): ["factor", "root"],
    }
    for (method, bits), names in expected.items():
        p = nn.Parameter(torch.randn(64, 130))
        optimizer = Shampoo([p], lr=0.1, method=method, bits=bits, storage="paper", max_order=70)
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert list(optimizer.state[p]) == ["step", "base", "block_0", "block_1", "product_bits"]
        assert list(optimizer.state[p]["base"]) == ["step", "exp_avg", "exp_avg_sq"]
        for side in ("left", "right"):
            assert list(optimizer.state[p]["block_0"][side]) == names


@pytest.mark.parametrize("kind", ["clear", "clear entries", "replace"])
def test_a_reset_state_is_a_fresh_start(kind: str) -> None:
    """After the state is cleared or replaced, F's moments and step counts also start from zero."""
    model, twin = network(), network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 5)
    twin.load_state_dict(model.state_dict())
    if kind == "clear":
        optimizer.state.clear()
    elif kind == "clear entries":
        for entry in optimizer.state.values():
            entry.clear()
    else:
        optimizer.state = defaultdict(dict)
    fresh = Shampoo(twin.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 5, first=5)
    run(twin, fresh, 5, first=5)
    assert same(weights(model), weights(twin))
    assert_same_state(optimizer.state_dict()["state"], fresh.state_dict()["state"])


def test_a_checkpoint_taken_by_a_hook_of_the_base_resumes_exactly() -> None:
    """When a hook of F runs, state and step counts belong to the same step."""
    model, twin = network(), network()
    base = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer = Shampoo(base, **FAST)
    saved = []
    base.register_step_post_hook(
        lambda *_: saved.append(
            (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
        )
    )
    run(model, optimizer, 7)
    for t in (2, 3):
        before, state = saved[t]
        twin.load_state_dict(before)
        resumed = Shampoo(torch.optim.SGD(twin.parameters(), lr=1e-2, momentum=0.9), **FAST)
        resumed.load_state_dict(state)
        run(twin, resumed, 6 - t, first=t + 1)
        assert same(weights(model), weights(twin))


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_copies_continue_like_the_original(kind: str) -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 5)
    both = (model, optimizer)
    if kind == "deepcopy":
        twin, twin_optimizer = copy.deepcopy(both)
    else:
        twin = copy.deepcopy(model)
        params, twin_optimizer = pickle.loads(pickle.dumps((list(model.parameters()), optimizer)))
        for p, q in zip(twin.parameters(), params, strict=True):
            assert torch.equal(p, q)
        # The unpickled optimizer has copies of the parameters: put them into the model.
        for (name, _), q in zip(list(twin.named_parameters()), params, strict=True):
            module, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(module), leaf, q)
    assert twin_optimizer.param_groups is twin_optimizer.base.param_groups
    run(model, optimizer, 5, first=5)
    run(twin, twin_optimizer, 5, first=5)
    assert same(weights(model), weights(twin))


def test_replaced_state_is_noticed_and_used() -> None:
    """Device moves and offloading replace every tensor of the state."""
    results = []
    for replaced in (False, True):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, method="eigen", **FAST)
        run(model, optimizer, 5)
        if replaced:
            for p in list(optimizer.state):
                optimizer.state[p] = copy.deepcopy(optimizer.state[p])
        run(model, optimizer, 5, first=5)
        results.append(weights(model))
    assert same(*results)
    left = optimizer.state[model.linear.weight]["block_0"]["left"]
    replacement = left["eigenvalues"] = torch.full_like(left["eigenvalues"], 7.0)
    # A single replaced tensor is noticed one step later.
    for noticed in (False, True):
        backward(model, 0)
        optimizer.step()
        left = optimizer.state[model.linear.weight]["block_0"]["left"]
        assert (left["eigenvalues"] > 6).all()  # even after the update at the second step
        assert (left["eigenvalues"] is not replacement) == noticed
    left["eigenvalues"] = torch.zeros(3)
    optimizer.step()
    with pytest.raises(ValueError, match=r"block_0\['left'\]\['eigenvalues'\] has shape \(3,\)"):
        optimizer.step()


@pytest.mark.parametrize("every", [{}, {"update_every": 3, "refresh_every": 3}])
def test_replacing_tensors_after_every_step_loses_nothing(every: dict[str, int]) -> None:
    states = []
    for replaced in (False, True):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **{**FAST, **every})
        for t in range(12):
            run(model, optimizer, 1, first=t)
            for block in blocks_of(optimizer.state[model.linear.weight]).values():
                for leaves in block.values() if replaced else ():
                    for name, leaf in leaves.items():
                        leaves[name] = leaf.clone()
        states.append({0: blocks_of(optimizer.state[model.linear.weight])})
    assert_same_state(*states)


def test_earlier_state_of_the_base_is_part_of_the_checkpoint() -> None:
    """If an optimizer is wrapped during a run, its moments are saved even before the next step."""
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(model, base, 3)
    optimizer = Shampoo(base, **FAST)
    twin = copy.deepcopy(model)
    other = Shampoo(twin.parameters(), lr=1e-3, **FAST)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, 5, first=3)
    run(twin, other, 5, first=3)
    assert same(weights(model), weights(twin))


def test_state_that_the_base_creates_late_is_shared() -> None:
    """The base fills its dicts in place: the only sign is that they are no longer empty."""

    class Late(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if self.steps > 2 and p.grad is not None:
                    state.setdefault("late", torch.zeros(()))

    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]
    base = Late(params, lr=0.1)
    optimizer = Shampoo(base)
    for t in range(8):
        params[0].grad = torch.ones(4, 3)
        params[1].grad = torch.ones(3) if t > 4 else None
        optimizer.step()
        for p in params:
            if base.state[p]:
                assert optimizer.state[p]["base"] is base.state[p], t
    assert all(base.state[p] for p in params)


def test_old_stacks_are_freed_without_a_garbage_collection() -> None:
    """After a checkpoint is loaded or a new plan is made, the stacks of the old plan are freed."""
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-3, **FAST)

    def stacks() -> weakref.ref[Factors]:
        (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
        return weakref.ref(preconditioner.stacks.groups[0].left)

    run(model, optimizer, 5)
    gc.collect()
    gc.disable()
    try:
        old_stacks = stacks()
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        assert old_stacks() is None
        run(model, optimizer, 1, first=5)
        old_stacks = stacks()
        for entry in optimizer.state.values():  # as offloading does
            for block in (value for key, value in entry.items() if key.startswith("block")):
                for side, leaves in block.items():
                    block[side] = {name: leaf.clone() for name, leaf in leaves.items()}
        run(model, optimizer, 2, first=6)
        assert old_stacks() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("algorithm", [Shampoo, KFAC])
@pytest.mark.parametrize("nonfinite", ["zero", "raise"])
def test_no_gradient_outlives_its_step(
    algorithm: Any, nonfinite: str, device: torch.device
) -> None:
    """Gradients that the optimizer holds on to would add their size to the next backward pass."""
    model = network(device)
    base, extra = sgd(model, lr=1e-3), {"model": model} if algorithm is KFAC else {}
    optimizer = algorithm(base, nonfinite=nonfinite, **FAST, **extra)
    for t in range(6):
        backward(model, t)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if t == 5:
            grads[0].fill_(torch.nan)
        references = [weakref.ref(grad) for grad in grads]
        del grads
        refused = nonfinite == "raise" and t == 5
        with pytest.raises(FloatingPointError) if refused else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        assert not any(reference() is not None for reference in references), t
