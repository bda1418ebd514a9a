"""kronbit around torch's optimizers has the properties that torch's tests check.

Options and bad inputs are those of ``torch.testing._internal.common_optimizers``.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.networks import weights
from support.numerics import slow
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

pytest.importorskip("expecttest")
# The import would freeze the flags of torch.backends in this process, but other tests set them.
with warnings.catch_warnings(), mock.patch("torch.backends.disable_global_flags"):
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import (
        get_error_inputs_for_all_optims,
        optim_db,
    )

from kronbit import CASPR, KFAC, AdaBK, Shampoo

# Optimizers that compute gradients themselves or accept only some parameters cannot be bases.
NO_BASES = {"LBFGS", "SparseAdam", "Muon"}
INFOS = {info.optim_cls.__name__: info for info in optim_db}
BASES = sorted(INFOS.keys() - NO_BASES)
OPTIONS = {"update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}


OTHERS = [CASPR, KFAC, AdaBK]


def optimizers_and_bases() -> list[Any]:
    """Return every optimizer with every base. Except for Shampoo, most are slow on a CPU."""
    params = [pytest.param(Shampoo, name, id=f"Shampoo-{name}") for name in BASES]
    for kind, name in itertools.product(OTHERS, BASES):
        marks = () if name in ("AdamW", "SGD") else slow
        params.append(pytest.param(kind, name, id=f"{kind.__name__}-{name}", marks=marks))
    return params


def cases() -> list[Any]:
    """Return Shampoo with every base and every set of options in torch's tests.

    The other optimizers use the defaults of every base. Some options need a GPU.
    """
    params = []
    for device, name in itertools.product(("cpu", "cuda"), BASES):
        for number, inputs in enumerate(INFOS[name].optim_inputs_func(device=device)):
            if device == "cuda":
                marks: Any = pytest.mark.gpu
            elif inputs.kwargs.get("capturable"):
                continue
            else:
                marks = slow if number > 1 else ()
            label = f"{device}-{name}-{number}-{inputs.desc}"
            params.append(pytest.param(device, name, inputs.kwargs, Shampoo, id=label, marks=marks))
    for device, (kind, name) in itertools.product(
        ("cpu", "cuda"), itertools.product(OTHERS, BASES)
    ):
        marks = pytest.mark.gpu if device == "cuda" else () if name == "AdamW" else slow
        label = f"{device}-{kind.__name__}-{name}"
        params.append(pytest.param(device, name, {}, kind, id=label, marks=marks))
    return params


def make(name: str, model: Any, options: dict[str, Any], kind: Any = Shampoo) -> Any:
    """Make an optimizer of a model, of parameters, or of groups."""
    params = model.parameters() if isinstance(model, nn.Module) else model
    arguments = {"model": model} if kind in (KFAC, AdaBK) else {}
    return kind(params, base=INFOS[name].optim_cls, **arguments, **options, **OPTIONS)


def layer(
    noncontiguous: bool = False, device: str | torch.device = "cpu"
) -> tuple[nn.Linear, Tensor]:
    """Return a linear layer and inputs."""
    torch.manual_seed(0)
    model = nn.Linear(7, 10).to(device)
    if noncontiguous:
        model.weight = nn.Parameter(torch.randn(10, 7, 2).to(device)[..., 0])
        model.bias = nn.Parameter(torch.randn(10, 2).to(device)[..., 0])
    assert model.weight.is_contiguous() != noncontiguous
    return model, torch.randn(3, 7).to(device)


def backward(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(x).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("noncontiguous", [False, True])
@pytest.mark.parametrize(("device", "name", "options", "kind"), cases())
def test_the_loss_goes_in_the_right_direction(
    device: str, name: str, options: dict[str, Any], kind: Any, noncontiguous: bool
) -> None:
    model, x = layer(noncontiguous, device)
    optimizer = make(name, model, options, kind)
    start = float(backward(model, x))
    for _ in range(20):
        # Torch's tests call step() with a closure.
        loss = optimizer.step(lambda: backward(model, x))
        assert isinstance(loss, Tensor)
    end = float(backward(model, x))
    assert (end > start) if options.get("maximize") else (end < start)


@pytest.mark.parametrize(("kind", "name"), optimizers_and_bases())
def test_the_loss_decreases_with_schedulers(kind: Any, name: str) -> None:
    for schedulers in INFOS[name].scheduler_inputs:
        model, x = layer()
        optimizer = make(name, model, {}, kind)
        instances = [scheduler(optimizer) for scheduler in schedulers]
        start = float(backward(model, x))
        for _ in range(20):
            loss = backward(model, x)
            optimizer.step()
            for scheduler in instances:
                by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([float(loss.detach())] if by_loss else []))
        assert float(backward(model, x)) < start


@pytest.mark.parametrize("name", BASES)
def test_groups_have_separate_learning_rates(name: str) -> None:
    model, x = layer()
    before = weights(model)
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [model.bias]}]
    optimizer = make(name, groups, {"lr": 0.01, "weight_decay": 0.0} if name != "Rprop" else {})
    for _ in range(3):
        backward(model, x)
        optimizer.step()
    assert torch.equal(model.weight, before[0]) or name in ("Adafactor", "Rprop")
    assert not torch.equal(model.bias, before[1])


@pytest.mark.parametrize("name", [name for name in BASES if INFOS[name].has_capturable_arg])
def test_a_learning_rate_may_be_a_tensor(name: str) -> None:
    results = []
    for lr in (torch.tensor(0.01), 0.01):
        model, x = layer()
        # A tensor and a float round differently, which may change a code.
        optimizer = make(name, model, {"lr": lr, "foreach": False, "bits": 32})
        for _ in range(4):
            backward(model, x)
            optimizer.step()
        results.append(weights(model))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", BASES)
def test_implementations_of_the_base_agree(name: str, device: torch.device) -> None:
    """The for-loop, foreach, fused and capturable implementations give the same weights."""
    info = INFOS[name]
    variants = [{impl: True} for impl in ("foreach", "fused") if impl in info.supported_impls]
    if device.type not in info.supports_fused_on:
        variants = [options for options in variants if "fused" not in options]
    if device.type == "cuda" and info.has_capturable_arg:
        variants += [{"capturable": True}, {"capturable": True, "foreach": True}]
    results = []
    for options in ({"foreach": False}, *variants):
        model, x = layer(device=device)
        # Implementations round differently, which may change a code.
        optimizer = make(name, model, {**options, "bits": 32})
        for _ in range(4):
            backward(model, x)
            optimizer.step()
        results.append(weights(model))
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "case",
    get_error_inputs_for_all_optims("cpu", torch.float32),
    ids=lambda case: case.optimizer_error_input.desc,
)
def test_torchs_bad_inputs_are_refused(case: Any) -> None:
    inputs = case.optimizer_error_input
    params = layer()[0].parameters() if inputs.params is None else inputs.params
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            make("AdamW", params, inputs.kwargs)
    else:
        with pytest.raises(case.error_type, match=case.error_regex):
            make("AdamW", params, inputs.kwargs)


def test_complex_matrices_are_refused_by_name() -> None:
    p = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    optimizer = make("AdamW", [("weight", p)], {})
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"weight is complex.*precondition=False"):
        optimizer.step()
    assert torch.equal(p, before)
    # Without preconditioning, the base handles them.
    optimizer = make("AdamW", [{"params": [("weight", p)], "precondition": False}], {})
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.isfinite(torch.view_as_real(p)).all()


@pytest.mark.parametrize(("device", "name", "options", "kind"), cases())
def test_parameters_without_gradients_do_not_change(
    device: str, name: str, options: dict[str, Any], kind: Any
) -> None:
    model, _ = layer(device=device)
    before = weights(model)
    optimizer = make(name, model, options, kind)
    optimizer.step()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    # The state is allocated, as torch.distributed.checkpoint requires, and no step is counted.
    assert "block_0" in optimizer.state[model.weight]
    assert all(entry["step"] == 0 for entry in optimizer.state.values())


@pytest.mark.parametrize(("device", "name", "options", "kind"), cases())
def test_kept_gradients_are_not_changed(
    device: str, name: str, options: dict[str, Any], kind: Any
) -> None:
    model, x = layer(device=device)
    params = list(model.parameters())
    optimizer = make(name, model, {**options, "keep_gradients": True}, kind)
    for _ in range(3):
        backward(model, x)
        before = [p.grad.clone() for p in params if p.grad is not None]
        optimizer.step()
        for p, grad in zip(params, before, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, grad)


def copied(optimizer: Any, model: nn.Module, by: str, folder: Path) -> tuple[Any, nn.Module]:
    if by == "deepcopy":
        twin, resumed = copy.deepcopy((model, optimizer))
        return resumed, twin
    if by == "pickle":
        twin, resumed = pickle.loads(pickle.dumps((model, optimizer)))
        return resumed, twin
    torch.save(optimizer.state_dict(), folder / "state.pt")
    twin = layer()[0]
    twin.load_state_dict(model.state_dict())
    resumed = make(type(optimizer.base).__name__, twin, {"lr": 0.5}, type(optimizer))
    resumed.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return resumed, twin


@pytest.mark.parametrize("by", ["deepcopy", "pickle", "saved"])
@pytest.mark.parametrize(("kind", "name"), optimizers_and_bases())
def test_copies_continue_bitwise_equal(kind: Any, name: str, by: str, tmp_path: Path) -> None:
    model, x = layer()
    optimizer = make(name, model, {}, kind)
    for _ in range(3):
        backward(model, x)
        optimizer.step()
    resumed, twin = copied(optimizer, model, by, tmp_path)
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()
    for _ in range(3):
        for module, stepping in ((model, optimizer), (twin, resumed)):
            backward(module, x)
            stepping.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [Shampoo, *OTHERS])
def test_hooks_are_called_in_order(kind: Any) -> None:
    model, x = layer()
    optimizer = make("AdamW", model, {}, kind)
    calls: list[str] = []

    def record(name: str) -> Any:
        return lambda *_: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(record("global before")),
        register_optimizer_step_post_hook(record("global after")),
        optimizer.register_step_pre_hook(record("before")),
        optimizer.register_step_post_hook(record("after")),
        optimizer.register_state_dict_pre_hook(record("saving")),
        optimizer.register_state_dict_post_hook(record("saved")),
        optimizer.register_load_state_dict_pre_hook(record("loading")),
        optimizer.register_load_state_dict_post_hook(record("loaded")),
    ]
    try:
        backward(model, x)
        optimizer.step()
        # The base is an optimizer too, so the global hooks are also called for it.
        assert calls[:2] == ["global before", "before"]
        assert calls[-2:] == ["after", "global after"]
        calls.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["saving", "saved", "loading", "loaded"]
    finally:
        for handle in handles:
            handle.remove()
    calls.clear()
    optimizer.step()
    assert not calls


@pytest.mark.parametrize("kind", [Shampoo, *OTHERS])
def test_hooks_may_replace_the_state_dict(kind: Any) -> None:
    model, x = layer()
    optimizer = make("AdamW", model, {"lr": 0.1}, kind)
    backward(model, x)
    optimizer.step()

    def with_rate(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.25} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    handle = optimizer.register_state_dict_post_hook(with_rate)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(with_rate)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(("kind", "name"), optimizers_and_bases())
def test_state_dict_is_deterministic(kind: Any, name: str) -> None:
    model, x = layer()
    optimizer = make(name, model, {}, kind)
    backward(model, x)
    optimizer.step()
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert repr(first) == repr(second)
    assert list(first["state"]) == [0, 1]
