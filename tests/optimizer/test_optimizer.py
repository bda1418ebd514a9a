"""Properties of the whole optimizer: first steps, state, closures, copies, devices."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections import defaultdict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.layers import sgd
from support.networks import FAST, assert_same_state, backward, network, run, same, weights
from support.numerics import no_host_sync, relative_error
from torch import Tensor, nn

from kronbit import KFAC, Shampoo
from kronbit.factors import Factors
from kronbit.state.binding import blocks_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("options", [{"bits": 32}, {"bits": 4}, {"bits": 4, "method": "naive"}])
def test_before_the_first_refresh_a_run_is_bitwise_equal_to_the_base(
    dtype: torch.dtype, make: Any, options: dict[str, Any], device: torch.device
) -> None:
    plain, wrapped = network(device, dtype), network(device, dtype)
    plain_optimizer = make(plain.parameters(), lr=1e-4)
    run(plain, plain_optimizer, 7)
    optimizer = Shampoo(
        make(wrapped.parameters(), lr=1e-4), update_every=2, refresh_every=8, **options
    )
    run(wrapped, optimizer, 7)
    assert same(weights(plain), weights(wrapped))
    run(plain, plain_optimizer, 1, first=7)
    run(wrapped, optimizer, 1, first=7)
    assert not same(weights(plain), weights(wrapped))


def test_32_bit_eigen_with_many_qr_iterations_converges_to_dense() -> None:
    """`dense` is exact enough only with more than the paper's ten Newton steps."""
    preconditioned = {}
    for name, options in {
        "eigen": {"method": "eigen", "qr_iterations": 300},
        "dense": {"newton_steps": 30},
        "dense 10": {},
    }.items():
        p = nn.Parameter(torch.zeros(40, 40))
        optimizer = Shampoo(
            torch.optim.SGD([p], lr=1.0),
            bits=32,
            update_every=1,
            refresh_every=4,
            damping=1e-5,
            **options,
        )
        generator = torch.Generator().manual_seed(0)
        left, right = (
            torch.linalg.qr(torch.randn(40, 40, generator=generator))[0] for _ in range(2)
        )
        spectrum = torch.logspace(0, -2, 40)  # L and R have condition 1e4
        for _ in range(4):
            noise = 0.1 * torch.randn(40, 40, generator=generator)
            p.grad = (left * spectrum) @ (torch.eye(40) + noise) @ (spectrum[:, None] * right.T)
            optimizer.step()
        preconditioned[name] = p.grad
    assert relative_error(preconditioned["eigen"], preconditioned["dense"]) < 1e-3
    assert relative_error(preconditioned["dense 10"], preconditioned["dense"]) > 0.02


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


@pytest.mark.gpu
def test_mixed_devices_in_one_optimizer() -> None:
    start, grads = torch.randn(2, 70, 66), [torch.randn(2, 70, 66) * 0.1 for _ in range(4)]
    results = []
    for devices in (("cpu", "cuda"), ("cpu", "cpu")):
        params = [nn.Parameter(w.to(d)) for w, d in zip(start, devices, strict=True)]
        optimizer = Shampoo(params, base="sgd", lr=0.1, damping=0.1, **FAST)
        for grad in grads:
            for p, g in zip(params, grad, strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
        results.append([p.detach().cpu() for p in params])
        assert {group["device"] for group in optimizer.diagnostics()["groups"]} == {
            str(p.device) for p in params
        }
    assert max(relative_error(a, b) for a, b in zip(*results, strict=True)) < 1e-3


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


def test_tables_do_not_depend_on_missing_gradients() -> None:
    """The sizes of gradients, which kernels read to measure norms, are listed once."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((70, 66), (3, 1, 20, 30), (5,))]
    optimizer = Shampoo(params, lr=1e-2, **FAST)
    for missing in (None, 0, 1):
        for i, p in enumerate(params):
            p.grad = None if i == missing else torch.randn(p.shape)
        optimizer.step()
        (device,) = optimizer._keeper._step_plan.devices
        assert device.sizes == [70 * 66, 3 * 20 * 30, 5]


def test_a_capture_by_the_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be part of a CUDA graph"):
        optimizer.step()
    assert_same_state(optimizer.state_dict()["state"], before)


def test_closures_run_once_with_gradients_enabled() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert calls == [True]
    assert float(loss.detach()) > 0
    assert optimizer.step() is None


def test_a_closures_exception_changes_nothing() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 3)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())

    def closure() -> float:
        raise KeyError("inside")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert same(before, weights(model))
    assert_same_state(state["state"], optimizer.state_dict()["state"])


def test_a_parameter_of_another_shape_is_refused() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    p.grad = torch.randn(64, 66)
    optimizer.step()
    p.data = torch.ones(66, 64)
    p.grad = torch.randn(66, 64)
    with pytest.raises(ValueError, match=r"has changed from \(64, 66\) to \(66, 64\)"):
        optimizer.step()


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
        params, state = pickle.loads(pickle.dumps((list(model.parameters()), optimizer)))
        twin_optimizer = state
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
    leaf = optimizer.state[model.linear.weight]["block_0"]["left"]
    replacement = leaf["eigenvalues"] = torch.full_like(leaf["eigenvalues"], 7.0)
    # A single replaced tensor is noticed one step later.
    for noticed in (False, True):
        backward(model, 0)
        optimizer.step()
        leaf = optimizer.state[model.linear.weight]["block_0"]["left"]
        assert (leaf["eigenvalues"] > 6).all()  # even after the update at the second step
        assert (leaf["eigenvalues"] is not replacement) == noticed
    leaf["eigenvalues"] = torch.zeros(3)
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


@pytest.mark.gpu
def test_a_model_may_move_to_another_device_between_steps() -> None:
    p = nn.Parameter(torch.ones(70, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1, **FAST)
    for t in range(8):
        if t == 5:
            p.data = p.data.cuda()
            for state in optimizer.base.state.values():
                for key, value in state.items():
                    state[key] = value.cuda()
        p.grad = torch.randn(70, 66).to(p.device)
        optimizer.step()
    assert optimizer.state[p]["block_0"]["left"]["codes"].is_cuda
    assert torch.isfinite(p).all()


def test_reduced_precision_settings_do_not_change_the_run() -> None:
    results = []
    for reduced in (False, True):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
        for t in range(6):
            optimizer.zero_grad()
            backward(model, t)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=reduced):
                optimizer.step()
        results.append(weights(model))
    assert same(*results)


def test_first_refresh_sets_the_first_preconditioned_step() -> None:
    p = nn.Parameter(torch.zeros(64, 66))
    optimizer = Shampoo(torch.optim.SGD([p], lr=0.0), first_refresh=3)
    changed = []
    for t in range(1, 15):
        p.grad = torch.randn(64, 66)
        before, roots = p.grad.clone(), copy.deepcopy(optimizer.state.get(p))
        optimizer.step()
        if not torch.equal(p.grad, before):
            changed.append(t)
        new = optimizer.state[p]["block_0"]["left"]["root_codes"]
        refreshed = roots is not None and not torch.equal(
            new, roots["block_0"]["left"]["root_codes"]
        )
        assert refreshed == (t in (3, 6, 12))
    assert changed == list(range(3, 15))


def test_step_hooks_run_and_nothing_warns() -> None:
    calls = []
    p = nn.Parameter(torch.zeros(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    p.grad = torch.randn(64, 66)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert calls == ["pre", "post"]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler_works_with_fused_bases(fused: bool) -> None:
    """The scaler unscales gradients before the step. On overflow, it skips the step and t stays."""
    model = network("cuda")
    optimizer = Shampoo(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), **FAST)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2)
    steps = 0
    for t in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(t)).cuda()
            loss = model(x).float().square().mean()
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += scaler.get_scale() >= before
    assert 0 < steps < 60
    assert optimizer.state[model.linear.weight]["step"] == steps
    assert optimizer.diagnostics()["skipped_gradients"] == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


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


def test_a_step_that_fails_in_the_base_does_not_count() -> None:
    """After the failure, the next step is step 1."""

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise MemoryError
            super().step()

    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = Shampoo(Failing([p], lr=1.0), update_every=1, refresh_every=2)
    p.grad = torch.randn(64, 64)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.state[p]["step"] == 0
    Failing.fails = False
    p.grad = torch.randn(64, 64)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("device_name", ["meta", "cpu"])
def test_the_default_device_does_not_matter(device_name: str) -> None:
    p = nn.Parameter(torch.ones(64, 66))
    grads = [torch.randn(64, 66) for _ in range(5)]
    optimizer = Shampoo([p], base="sgd", lr=0.1, **FAST)
    with torch.device(device_name):
        for grad in grads:
            p.grad = grad
            optimizer.step()
        copied = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copied)
    assert optimizer.state[p]["block_0"]["left"]["codes"].device.type == "cpu"


@pytest.mark.gpu
def test_the_gpu_may_be_the_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        model = nn.Linear(70, 66)
        optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 70)).square().mean().backward()
            optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_configs_of_scheduled_options_do_not_accumulate() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    for t in range(50):
        optimizer.param_groups[0]["damping"] = 1e-6 * (1 + t)
        p.grad = torch.randn(64, 66)
        optimizer.step()
    assert len(optimizer._groups._known) < 10


def test_identity_roots_do_not_change_the_gradient() -> None:
    """Zero statistics have no root, so a refresh keeps the identity."""
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = Shampoo([p], base="sgd", lr=1.0, update_every=1, refresh_every=1, damping=0.0)
    p.grad = torch.zeros(64, 64)
    optimizer.step()
    optimizer.param_groups[0]["update_every"] = optimizer.param_groups[0]["refresh_every"] = 100
    grad = 1e-8 * torch.randn(64, 64)
    p.grad = grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, grad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ordinary_step_never_waits_for_the_device(dtype: torch.dtype) -> None:
    model = network("cuda", dtype)
    base = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer = Shampoo(base, update_every=3, refresh_every=3)
    run(model, optimizer, 4)
    for t in (4, 6, 7):  # steps 5, 7 and 8; step 6 updates and refreshes
        optimizer.zero_grad()
        backward(model, t)
        if t == 7:
            model.linear.weight.grad = None  # a new set of parameters with gradients
        with no_host_sync():
            optimizer.step()
        if t == 4:
            run(model, optimizer, 1, first=5)


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
