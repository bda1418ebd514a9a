"""EVA and M-FAC as optimizers: bases, checkpoints, schedulers, closures, non-finite gradients."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.baselines import eva, mfac
from support.layers import hooks, sgd
from support.networks import assert_same_state, network, run, same, tensors, weights
from support.numerics import no_host_sync
from torch import nn
from torch.optim import Optimizer

from kronbit import Shampoo
from kronbit.baselines import EVA, MFAC
from kronbit.baselines.rewriter import Rewriter, graft

Build = Callable[..., Rewriter]

both = pytest.mark.parametrize("build", [eva, mfac])


@both
@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_bases_by_name_match_constructed_ones(build: Build, base: str) -> None:
    make = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }[base]
    results = []
    for named in (True, False):
        model = network()
        params = model.parameters()
        options: dict[str, Any] = {"model": model} if build is eva else {"gradients": 3}
        kind = EVA if build is eva else MFAC
        optimizer = (
            kind(params, base=base, lr=1e-2, **options) if named else kind(make(params), **options)
        )
        run(model, optimizer, 4)
        results.append(weights(model))
    assert same(*results)
    plain = network()
    run(plain, make(plain.parameters()), 4)
    assert not same(results[0], weights(plain))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_runs_resume_bit_for_bit(
    build: Build, kind: type[Optimizer], dtype: torch.dtype, device: torch.device
) -> None:
    def start() -> tuple[nn.Module, Rewriter]:
        model = network(device, dtype)
        return model, build(model, kind(model.parameters(), lr=1e-3))

    model, optimizer = start()
    run(model, optimizer, 5)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    run(model, optimizer, 4, first=5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = start()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for (path, leaf), loaded in zip(
        tensors(saved[1]).items(), tensors(resumed.state_dict()).values(), strict=True
    ):
        assert leaf.dtype == loaded.dtype, path
        assert torch.equal(leaf, loaded), path
        assert leaf.data_ptr() != loaded.data_ptr() or not leaf.numel() or path.startswith("/base")
    run(again, resumed, 4, first=5)
    assert same(weights(model), weights(again))
    assert_same_state(optimizer.state_dict()["state"], resumed.state_dict()["state"])
    assert_same_state(optimizer.state_dict()["common"], resumed.state_dict()["common"])
    assert_same_state(optimizer.base.state_dict()["state"], resumed.base.state_dict()["state"])


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def remove(saved: Any) -> None:
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return remove


def shortened(*path: Any) -> Callable[[dict[str, Any]], None]:
    def shorten(saved: Any) -> None:
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = saved[path[-1]][:-1]

    return shorten


REFUSED = [
    (eva, without("state"), "'state' is missing: this is not a state dict of EVA"),
    (mfac, without("common"), "'common' is missing: this is not a state dict of MFAC"),
    (mfac, without("base"), "'base' is missing"),
    (mfac, without("base", "state"), r"base\.state is missing"),
    (eva, shortened("param_groups"), "checkpoint has 0 param groups, the optimizer has 1"),
    (eva, shortened("param_groups", 0, "params"), r"groups\[0\] has 3 parameters in the checkp"),
    (mfac, shortened("base", "param_groups", 0, "params"), r"base.param_groups\[0\] has 3 para"),
    (eva, without("state", 0, "output_mean"), r"state\[0\]\['output_mean'\] is missing"),
    (eva, shortened("state", 0, "input_mean"), r"input_mean'\] has shape \(0, 7\); expected"),
    (mfac, shortened("state", 2, "gradients"), r"state\[2\]\['gradients'\] has shape \(2, 3, 5\)"),
    (mfac, shortened("common", "gram"), r"gram'\] has shape \(2, 3\); .*options that the checkp"),
    (mfac, lambda saved: saved["common"].clear(), r"common\['stored'\] is missing"),
    (eva, lambda saved: saved["state"][0].update(step=3), "is int; expected a tensor of torch.int"),
    (
        eva,
        lambda saved: saved["state"].update({1: saved["state"][0]}),
        r"state\[1\] belongs to a param",
    ),
    (mfac, lambda saved: saved["state"].update({9: {"a": 1}}), r"state\[9\] belongs to no param"),
    (eva, without("base", "state", 0, "exp_avg"), r"base\['state'\]\[0\]\['exp_avg'\] is missing"),
    (eva, shortened("base", "state", 0, "exp_avg"), r"\['exp_avg'\] has shape \(4, 6\); expected"),
]


@pytest.mark.parametrize(("build", "damage", "message"), REFUSED)
def test_incompatible_checkpoints_change_nothing(
    build: Build, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    def start() -> tuple[nn.Module, Rewriter]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = build(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    saved = copy.deepcopy(start()[1].state_dict())
    _, optimizer = start()
    before = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert before["param_groups"] == now["param_groups"]
    for key in ("state", "common", "base"):
        assert_same_state(now[key], before[key])


@both
def test_schedulers_and_closures_work_as_in_torch(build: Build) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, calls = torch.randn(8, 6), []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(loss.detach())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure))
            scheduler.step()
    assert calls == [True] * 3
    assert losses[0] > losses[1] > losses[2]
    assert optimizer.base.param_groups[0]["lr"] == 0.1 / 8
    assert optimizer.param_groups is optimizer.base.param_groups
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is optimizer.base.param_groups
    optimizer.zero_grad()
    assert optimizer.step() is None


@both
@pytest.mark.parametrize("bad", [0, 2, 5])
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_steps_with_nonfinite_gradients_leave_no_trace(
    build: Build, bad: int, factor: float, device: torch.device
) -> None:
    """Either the first step or a later one has a non-finite gradient."""

    def states(skip: bool) -> dict[str, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
        optimizer = build(model, sgd(model, lr=0.0))
        start = copy.deepcopy(model.state_dict())
        for t in range(8):
            x = torch.randn(8, 6).to(device)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if t == bad:
                if skip:
                    continue
                model[2].bias.grad[1] *= factor
                before = [p.grad.clone() for p in model.parameters()]
                stored = tensors(copy.deepcopy(optimizer.state_dict()))
                optimizer.step()
                for p, grad in zip(model.parameters(), before, strict=True):
                    assert torch.equal(p.grad.nan_to_num(7), grad.nan_to_num(7))
                for path, tensor in tensors(optimizer.state_dict()).items():
                    assert torch.equal(tensor, stored.get(path, torch.zeros_like(tensor))), path
                model.load_state_dict(start)  # undo F's step
            else:
                optimizer.step()
        assert optimizer.diagnostics()["skipped_steps"] == (not skip)
        return {**optimizer.state_dict(), "base": {}}

    actual, expected = states(skip=False), states(skip=True)
    assert tensors(actual)
    assert_same_state(actual, expected)


@both
def test_optimizers_can_be_copied_and_pickled_with_their_model(build: Build) -> None:
    model = network()
    optimizer = build(model, sgd(model, lr=1e-3))
    run(model, optimizer, 3)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    for twin, other in copies:
        run(twin, other, 4, first=3)
    assert_same_state(optimizer.state_dict()["state"], expected)  # the copies have separate state
    run(model, optimizer, 4, first=3)
    for twin, other in copies:
        assert same(weights(twin), weights(model))
        assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


@both
def test_both_solve_a_regression(build: Build, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    x = torch.randn(64, 8, device=device) * torch.logspace(0, -1, 8, device=device)
    target = torch.stack([x[:, 0].sin(), x.square().sum(1)], 1)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = build(model, base)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@both
def test_schedule_free_bases_switch_modes(build: Build) -> None:
    pytest.importorskip("schedulefree")
    model = network()
    kind, options = (EVA, {"model": model}) if build is eva else (MFAC, {})
    optimizer = kind(model.parameters(), base="schedulefree-sgd", lr=0.1, **options)
    optimizer.train()
    run(model, optimizer, 3)
    training = weights(model)
    optimizer.eval()
    assert not same(weights(model), training)
    plain = build(network())
    plain.train()
    plain.eval()


@both
def test_gradients_that_share_memory_are_copied(build: Build) -> None:
    model = nn.Linear(6, 5)
    optimizer = build(model)
    model(torch.randn(8, 6)).sum().backward()
    model.bias.grad = torch.ones(1).expand(5)
    optimizer.step()
    assert model.bias.grad.is_contiguous()


def test_a_gradient_in_half_precision_saturates() -> None:
    G, Ghat = torch.full((4,), 6e4), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert graft(G, Ghat, torch.float16).tolist() == [65504.0, 0.0, 0.0, 0.0]
    assert graft(G, Ghat, torch.float32)[0] == G.norm()
    assert not graft(G * 0, Ghat, torch.float32).any()


@both
def test_wrapping_an_optimizer_twice_is_refused(build: Build) -> None:
    model = nn.Linear(6, 5)
    optimizer = build(model)
    with pytest.raises(TypeError, match=f"{type(optimizer).__name__} rewrites gradients already"):
        build(model, optimizer)
    with pytest.raises(TypeError, match="already wrapped in a kronbit optimizer"):
        build(model, Shampoo(sgd(model)))


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (eva, {"model": [1]}, TypeError, "model must be an nn.Module; got list"),
        (eva, {"model": nn.Linear(3, 3)}, ValueError, "none of the parameters is the weight of"),
        (eva, {"beta": 1.0}, ValueError, r"beta must be a number in \[0, 1\); got 1.0"),
        (eva, {"beta": -0.1}, ValueError, "beta must be .* got -0.1"),
        (eva, {"beta": "0.9"}, ValueError, "beta must be .* got '0.9'"),
        (eva, {"damping": 0.0}, ValueError, "damping must be a finite number above 0; got 0.0"),
        (mfac, {"damping": -1}, ValueError, "damping must be a finite number above 0; got -1"),
        (mfac, {"damping": torch.inf}, ValueError, "damping must be .* got inf"),
        (mfac, {"gradients": 0}, ValueError, "gradients must be an integer >= 1; got 0"),
        (mfac, {"gradients": 2.0}, ValueError, "gradients must be an integer >= 1; got 2.0"),
        (mfac, {"lr": 0.1}, TypeError, "no option 'lr'.*constructor of SGD"),
    ],
)
def test_bad_arguments_change_nothing(
    build: Build, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = nn.Linear(6, 5)
    base = sgd(model)
    with pytest.raises(error, match=message):
        EVA(base, **{"model": model, **options}) if build is eva else MFAC(base, **options)
    assert hooks(model) == 0
    assert len(base.param_groups[0]["params"]) == 2
    with pytest.raises(TypeError, match="model"):
        EVA(base)  # type: ignore[call-arg]


@pytest.mark.gpu
@both
def test_a_step_does_not_wait_for_the_gpu(build: Build) -> None:
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 3)).cuda()
    optimizer = build(model)
    for t in range(4):
        model(torch.randn(8, 70, device="cuda")).square().sum().backward()
        if t:
            with no_host_sync():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
