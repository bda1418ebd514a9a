"""Steps of the whole optimizer: first steps, closures, hooks, failures, devices."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.networks import FAST, assert_same_state, backward, network, run, same, weights
from support.numerics import no_host_sync, relative_error
from torch import Tensor, nn

from kronbit import Shampoo


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


def test_autocast_around_the_step_does_not_change_the_run() -> None:
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
