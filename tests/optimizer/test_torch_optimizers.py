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
from support.numerics import slow
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

from kronbit import CASPR, KFAC, AdaBK, Shampoo

# Those that take their own gradients, or only some parameters, are no bases.
NO_BASES = {"LBFGS", "SparseAdam", "Muon"}
INFOS = {info.optim_cls.__name__: info for info in optim_db}
BASES = sorted(INFOS.keys() - NO_BASES)
EVERY = {"update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}


OTHERS = [CASPR, KFAC, AdaBK]


def each_of_ours() -> list[Any]:
    """Every optimizer around every base; on a CPU, some stand for all but Shampoo."""
    found = [pytest.param(Shampoo, name, id=f"Shampoo-{name}") for name in BASES]
    for kind, name in itertools.product(OTHERS, BASES):
        marks = () if name in ("AdamW", "SGD") else slow
        found.append(pytest.param(kind, name, id=f"{kind.__name__}-{name}", marks=marks))
    return found


def cases() -> list[Any]:
    """Every base with every set of options that torch tests it with; some are for GPUs alone.

    Our other optimizers with every base, as it comes.
    """
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
            found.append(pytest.param(device, name, given.kwargs, Shampoo, id=label, marks=marks))
    for device, (kind, name) in itertools.product(
        ("cpu", "cuda"), itertools.product(OTHERS, BASES)
    ):
        marks = pytest.mark.gpu if device == "cuda" else () if name == "AdamW" else slow
        label = f"{device}-{kind.__name__}-{name}"
        found.append(pytest.param(device, name, {}, kind, id=label, marks=marks))
    return found


def make(name: str, model: Any, options: dict[str, Any], kind: Any = Shampoo) -> Any:
    """Of a model, or of parameters or groups."""
    params = model.parameters() if isinstance(model, nn.Module) else model
    own = {"model": model} if kind in (KFAC, AdaBK) else {}
    return kind(params, base=INFOS[name].optim_cls, **own, **options, **EVERY)


def layer(
    noncontiguous: bool = False, device: str | torch.device = "cpu"
) -> tuple[nn.Linear, Tensor]:
    """A weight and a bias, and inputs."""
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


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("noncontiguous", [False, True])
@pytest.mark.parametrize(("device", "name", "options", "kind"), cases())
def test_it_goes_into_the_right_direction(
    device: str, name: str, options: dict[str, Any], kind: Any, noncontiguous: bool
) -> None:
    model, x = layer(noncontiguous, device)
    optimizer = make(name, model, options, kind)
    start = float(backward(model, x))
    for _ in range(20):
        # Torch's tests call it with a closure.
        loss = optimizer.step(lambda: backward(model, x))
        assert isinstance(loss, Tensor)
    end = float(backward(model, x))
    assert (end > start) if options.get("maximize") else (end < start)


@pytest.mark.parametrize(("kind", "name"), each_of_ours())
def test_with_schedulers_too(kind: Any, name: str) -> None:
    for schedulers in INFOS[name].scheduler_inputs:
        model, x = layer()
        optimizer = make(name, model, {}, kind)
        own = [scheduler(optimizer) for scheduler in schedulers]
        start = float(backward(model, x))
        for _ in range(20):
            loss = backward(model, x)
            optimizer.step()
            for scheduler in own:
                by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([float(loss.detach())] if by_loss else []))
        assert float(backward(model, x)) < start


@pytest.mark.parametrize("name", BASES)
def test_a_group_has_a_learning_rate_of_its_own(name: str) -> None:
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
        # The two round differently, which may move a code.
        optimizer = make(name, model, {"lr": lr, "foreach": False, "bits": 32})
        for _ in range(4):
            backward(model, x)
            optimizer.step()
        results.append(weights(model))
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
        model, x = layer(device=device)
        # They round differently, which may move a code.
        optimizer = make(name, model, {**way, "bits": 32})
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
    given = case.optimizer_error_input
    params = layer()[0].parameters() if given.params is None else given.params
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


@pytest.mark.parametrize(("device", "name", "options", "kind"), cases())
def test_parameters_without_gradients_stay(
    device: str, name: str, options: dict[str, Any], kind: Any
) -> None:
    model, _ = layer(device=device)
    before = weights(model)
    optimizer = make(name, model, options, kind)
    optimizer.step()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    # The state is laid out, as torch.distributed.checkpoint wants it, and nothing has happened.
    assert all(entry["step"] == 0 for entry in optimizer.state.values())


@pytest.mark.parametrize(("device", "name", "options", "kind"), cases())
def test_gradients_are_never_written_to_if_they_are_kept(
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


def copied(optimizer: Any, model: nn.Module, way: str, folder: Path) -> tuple[Any, nn.Module]:
    if way == "deepcopy":
        twin, again = copy.deepcopy((model, optimizer))
        return again, twin
    if way == "pickle":
        twin, again = pickle.loads(pickle.dumps((model, optimizer)))
        return again, twin
    torch.save(optimizer.state_dict(), folder / "state.pt")
    twin = layer()[0]
    twin.load_state_dict(model.state_dict())
    again = make(type(optimizer.base).__name__, twin, {"lr": 0.5}, type(optimizer))
    again.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return again, twin


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "saved"])
@pytest.mark.parametrize(("kind", "name"), each_of_ours())
def test_copies_go_on_to_the_bit(kind: Any, name: str, way: str, tmp_path: Path) -> None:
    model, x = layer()
    optimizer = make(name, model, {}, kind)
    for _ in range(3):
        backward(model, x)
        optimizer.step()
    again, twin = copied(optimizer, model, way, tmp_path)
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()
    for _ in range(3):
        for own, stepping in ((model, optimizer), (twin, again)):
            backward(own, x)
            stepping.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [Shampoo, *OTHERS])
def test_hooks_are_called_in_order(kind: Any) -> None:
    model, x = layer()
    optimizer = make("AdamW", model, {}, kind)
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
        backward(model, x)
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


@pytest.mark.parametrize("kind", [Shampoo, *OTHERS])
def test_a_hook_may_replace_what_is_saved_and_loaded(kind: Any) -> None:
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


@pytest.mark.parametrize(("kind", "name"), each_of_ours())
def test_the_state_dict_is_always_the_same(kind: Any, name: str) -> None:
    model, x = layer()
    optimizer = make(name, model, {}, kind)
    backward(model, x)
    optimizer.step()
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert repr(first) == repr(second)
    assert list(first["state"]) == [0, 1]
