"""What torch's own tests ask of every optimizer, over ours, around torch's own.

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
from conftest import slow
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

pytest.importorskip("expecttest")
# It would forbid everybody in this process to set flags of backends, which other tests do.
with warnings.catch_warnings(), mock.patch("torch.backends.disable_global_flags"):
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import (
        get_error_inputs_for_all_optims,
        optim_db,
    )

from kronbit import CASPR, Shampoo

# Those that take their own gradients, or only some parameters, are no bases.
NO_BASES = {"LBFGS", "SparseAdam", "Muon"}
INFOS = {info.optim_cls.__name__: info for info in optim_db}
BASES = sorted(INFOS.keys() - NO_BASES)
EVERY = {"update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}


def cases() -> list[Any]:
    """Every base with every set of options that torch tests it with; some are for GPUs alone."""
    found = []
    for device, name in itertools.product(("cpu", "cuda"), BASES):
        for number, given in enumerate(INFOS[name].optim_inputs_func(device=device)):
            if device == "cuda":
                marks: Any = pytest.mark.gpu
            elif given.kwargs.get("capturable"):
                continue
            else:
                marks = slow if number > 1 else ()
            label = f"{device}-{name}-{number}-{given.desc}"
            found.append(pytest.param(device, name, given.kwargs, id=label, marks=marks))
    return found


def make(name: str, params: Any, options: dict[str, Any], kind: Any = Shampoo) -> Any:
    return kind(params, base=INFOS[name].optim_cls, **options, **EVERY)


def layer(
    noncontiguous: bool = False, device: str | torch.device = "cpu"
) -> tuple[list[nn.Parameter], Tensor]:
    """A weight, a bias and an input."""
    torch.manual_seed(0)
    weight = torch.randn(10, 7) if not noncontiguous else torch.randn(10, 7, 2).to(device)[..., 0]
    bias = torch.randn(10) if not noncontiguous else torch.randn(10, 2).to(device)[..., 0]
    params = [nn.Parameter(weight.to(device)), nn.Parameter(bias.to(device))]
    assert params[0].is_contiguous() != noncontiguous
    return params, torch.randn(7).to(device)


def backward(params: list[nn.Parameter], x: Tensor) -> Tensor:
    for p in params:
        p.grad = None
    loss = (params[0].mv(x) + params[1]).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("noncontiguous", [False, True])
@pytest.mark.parametrize(("device", "name", "options"), cases())
def test_it_goes_into_the_right_direction(
    device: str, name: str, options: dict[str, Any], noncontiguous: bool
) -> None:
    params, x = layer(noncontiguous, device)
    optimizer = make(name, params, options)
    start = float(backward(params, x))
    for _ in range(20):
        # Torch's tests call it with a closure.
        loss = optimizer.step(lambda: backward(params, x))
        assert isinstance(loss, Tensor)
    end = float(backward(params, x))
    assert (end > start) if options.get("maximize") else (end < start)


@pytest.mark.parametrize("kind", [Shampoo, pytest.param(CASPR, marks=slow)])
@pytest.mark.parametrize("name", BASES)
def test_with_schedulers_too(name: str, kind: Any) -> None:
    for schedulers in INFOS[name].scheduler_inputs:
        params, x = layer()
        optimizer = make(name, params, {}, kind)
        own = [scheduler(optimizer) for scheduler in schedulers]
        start = float(backward(params, x))
        for _ in range(20):
            loss = backward(params, x)
            optimizer.step()
            for scheduler in own:
                by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([float(loss.detach())] if by_loss else []))
        assert float(backward(params, x)) < start


@pytest.mark.parametrize("name", BASES)
def test_a_group_has_a_learning_rate_of_its_own(name: str) -> None:
    params, x = layer()
    before = [p.detach().clone() for p in params]
    groups = [{"params": [params[0]], "lr": 0.0}, {"params": [params[1]]}]
    optimizer = make(name, groups, {"lr": 0.01, "weight_decay": 0.0} if name != "Rprop" else {})
    for _ in range(3):
        backward(params, x)
        optimizer.step()
    assert torch.equal(params[0], before[0]) or name in ("Adafactor", "Rprop")
    assert not torch.equal(params[1], before[1])


@pytest.mark.parametrize("name", [name for name in BASES if INFOS[name].has_capturable_arg])
def test_a_learning_rate_may_be_a_tensor(name: str) -> None:
    results = []
    for lr in (torch.tensor(0.01), 0.01):
        params, x = layer()
        # The two round differently, which may move a code.
        optimizer = make(name, params, {"lr": lr, "foreach": False, "bits": 32})
        for _ in range(4):
            backward(params, x)
            optimizer.step()
        results.append([p.detach() for p in params])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", BASES)
def test_implementations_of_the_base_agree(name: str, device: torch.device) -> None:
    """One parameter after the other, all at once, in one kernel, and for CUDA graphs."""
    info = INFOS[name]
    ways = [{way: True} for way in ("foreach", "fused") if way in info.supported_impls]
    if device.type not in info.supports_fused_on:
        ways = [way for way in ways if "fused" not in way]
    if device.type == "cuda" and info.has_capturable_arg:
        ways += [{"capturable": True}, {"capturable": True, "foreach": True}]
    results = []
    for way in ({"foreach": False}, *ways):
        params, x = layer(device=device)
        # They round differently, which may move a code.
        optimizer = make(name, params, {**way, "bits": 32})
        for _ in range(4):
            backward(params, x)
            optimizer.step()
        results.append([p.detach() for p in params])
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "case",
    get_error_inputs_for_all_optims("cpu", torch.float32),
    ids=lambda case: case.optimizer_error_input.desc,
)
def test_torchs_bad_inputs_are_refused(case: Any) -> None:
    given = case.optimizer_error_input
    params = layer()[0] if given.params is None else given.params
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            make("AdamW", params, given.kwargs)
    else:
        with pytest.raises(case.error_type, match=case.error_regex):
            make("AdamW", params, given.kwargs)


def test_complex_matrices_are_refused_by_name() -> None:
    p = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    optimizer = make("AdamW", [("weight", p)], {})
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"weight is complex.*precondition=False"):
        optimizer.step()
    assert torch.equal(p, before)
    # Left to the base, they are its affair.
    optimizer = make("AdamW", [{"params": [("weight", p)], "precondition": False}], {})
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.isfinite(torch.view_as_real(p)).all()


@pytest.mark.parametrize(("device", "name", "options"), cases())
def test_parameters_without_gradients_stay(device: str, name: str, options: dict[str, Any]) -> None:
    params, _ = layer(device=device)
    before = [p.detach().clone() for p in params]
    optimizer = make(name, params, options)
    optimizer.step()
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)
    # The state is laid out, as torch.distributed.checkpoint wants it, and nothing has happened.
    assert all(entry["step"] == 0 for entry in optimizer.state.values())


@pytest.mark.parametrize(("device", "name", "options"), cases())
def test_gradients_are_never_written_to_if_they_are_kept(
    device: str, name: str, options: dict[str, Any]
) -> None:
    params, x = layer(device=device)
    optimizer = make(name, params, {**options, "keep_gradients": True})
    for _ in range(3):
        backward(params, x)
        before = [p.grad.clone() for p in params if p.grad is not None]
        optimizer.step()
        for p, grad in zip(params, before, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, grad)


def copied(optimizer: Any, params: list[nn.Parameter], way: str, folder: Path) -> tuple[Any, Any]:
    if way == "deepcopy":
        twins, again = copy.deepcopy((params, optimizer))
        return again, twins
    if way == "pickle":
        twins, again = pickle.loads(pickle.dumps((params, optimizer)))
        return again, twins
    torch.save(optimizer.state_dict(), folder / "state.pt")
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    again = type(optimizer)(twins, base=type(optimizer.base), lr=0.5, **EVERY)
    again.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return again, twins


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "saved"])
@pytest.mark.parametrize("name", BASES)
def test_copies_go_on_to_the_bit(name: str, way: str, tmp_path: Path) -> None:
    params, x = layer()
    optimizer = make(name, params, {})
    for _ in range(3):
        backward(params, x)
        optimizer.step()
    again, twins = copied(optimizer, params, way, tmp_path)
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()
    for _ in range(3):
        for own, stepping in ((params, optimizer), (twins, again)):
            backward(own, x)
            stepping.step()
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)


def test_hooks_are_called_in_order() -> None:
    params, x = layer()
    optimizer = make("AdamW", params, {})
    told: list[str] = []

    def tell(word: str) -> Any:
        return lambda *_: told.append(word)

    handles = [
        register_optimizer_step_pre_hook(tell("global before")),
        register_optimizer_step_post_hook(tell("global after")),
        optimizer.register_step_pre_hook(tell("before")),
        optimizer.register_step_post_hook(tell("after")),
        optimizer.register_state_dict_pre_hook(tell("saving")),
        optimizer.register_state_dict_post_hook(tell("saved")),
        optimizer.register_load_state_dict_pre_hook(tell("loading")),
        optimizer.register_load_state_dict_post_hook(tell("loaded")),
    ]
    try:
        backward(params, x)
        optimizer.step()
        # Its base is an optimizer as well, and has the global ones, too.
        assert told[:2] == ["global before", "before"]
        assert told[-2:] == ["after", "global after"]
        told.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert told == ["saving", "saved", "loading", "loaded"]
    finally:
        for handle in handles:
            handle.remove()
    told.clear()
    optimizer.step()
    assert not told


def test_a_hook_may_replace_what_is_saved_and_loaded() -> None:
    params, x = layer()
    optimizer = make("AdamW", params, {"lr": 0.1})
    backward(params, x)
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


@pytest.mark.parametrize("name", BASES)
def test_the_state_dict_is_always_the_same(name: str) -> None:
    params, x = layer()
    optimizer = make(name, params, {})
    backward(params, x)
    optimizer.step()
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert repr(first) == repr(second)
    assert list(first["state"]) == [0, 1]
