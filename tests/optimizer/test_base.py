"""F is given by name, class or import path, and errors name what is wrong."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import nn

from kronbit import Shampoo
from kronbit import base as first_order
from kronbit.state.binding import _keep_on_host

EXPECTED = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "nadamw": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def parameter() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(66, 70))


def trained(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        p.grad = torch.randn(66, 70, generator=generator)
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize("name", EXPECTED)
def test_names_build_the_bases_of_the_paper(name: str) -> None:
    kind, settings = EXPECTED[name]
    p, q = parameter(), parameter()
    by_name = Shampoo([p], base=name, lr=1e-2)
    assert type(by_name.base) is kind
    assert settings.items() <= by_name.param_groups[0].items()
    constructed = Shampoo(kind([q], lr=1e-2, **settings))
    assert torch.equal(trained(by_name, p), trained(constructed, q))


def test_options_override_the_defaults_of_a_name() -> None:
    optimizer = Shampoo([parameter()], base="sgd", lr=1e-2, momentum=0.0, weight_decay=0.5)
    assert optimizer.param_groups[0]["momentum"] == 0.0
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_classes_import_paths_and_factories_build_the_base() -> None:
    for base in (
        torch.optim.RAdam,
        "torch.optim.RAdam",
        "torch.optim:RAdam",
        lambda params, lr: torch.optim.RAdam(params, lr=lr),
    ):
        optimizer = Shampoo([parameter()], base=base, lr=1e-2)
        assert type(optimizer.base) is torch.optim.RAdam
    assert type(Shampoo([parameter()]).base) is torch.optim.AdamW


def test_an_optimizer_is_used_as_base_with_or_without_its_parameters() -> None:
    p = parameter()
    for arguments in ((), ([p],), ([{"params": p}],), ([("weight", p)],)):
        base = torch.optim.SGD([p], lr=0.1)
        assert Shampoo(*arguments, base=base).base is base
    with pytest.raises(TypeError, match="base=SGD does not optimize the given parameters"):
        Shampoo([parameter()], base=torch.optim.SGD([p], lr=0.1))
    with pytest.raises(TypeError, match="pass parameters, or an optimizer"):
        Shampoo(base="adamw")


def test_a_base_with_an_option_named_like_one_of_kronbit_is_refused() -> None:
    class Lion(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)
            self.defaults["beta"] = 0.5

    with pytest.raises(TypeError, match="Lion has an option 'beta' in its param groups"):
        Shampoo(Lion([parameter()]))


def test_groups_and_names_reach_the_base() -> None:
    model = nn.Linear(4, 3)
    optimizer = Shampoo(model.named_parameters(), lr=1e-2)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    groups = [{"params": [model.weight], "lr": 0.5, "bits": 8}, {"params": [model.bias]}]
    optimizer = Shampoo(groups, lr=1e-2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-2]
    assert [group["bits"] for group in optimizer.param_groups] == [8, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"base": "adanw"}, ValueError, "base must be one of sgd.*'adanw'; did you mean 'adamw'"),
        ({"base": "nowhere.Thing"}, ImportError, "cannot import 'nowhere.Thing'"),
        ({"base": "torch.optim.Nothing"}, ImportError, "cannot import 'torch.optim.Nothing'"),
        ({"base": 3}, TypeError, "a name, an import path, a class or an optimizer; got 3"),
        ({"base": "."}, ImportError, r"cannot import '\.'"),
        ({"base": "torch.nn.Linear"}, TypeError, "is not a torch.optim.Optimizer"),
        ({"base": "builtins.sorted"}, TypeError, "does not return a torch.optim.Optimizer"),
        ({"lr": 1e-2, "weigth_decay": 0.1}, TypeError, "'weigth_decay'; did you mean 'weight_dec"),
        ({"bit": 4}, TypeError, "neither kronbit nor AdamW has an option 'bit'; did you mean 'bi"),
        ({"eps": 1e-8, "bits": 5}, ValueError, "bits must be one of .* got 5"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Shampoo([parameter()], **arguments)


def test_contradictions_are_refused_and_change_nothing() -> None:
    base = torch.optim.SGD([parameter()], lr=0.1)
    before = dict(base.param_groups[0])
    with pytest.raises(TypeError, match=r"got an optimizer and base='adamw'"):
        Shampoo(base, base="adamw")
    with pytest.raises(TypeError, match=r"no option 'lr'.*constructor of SGD"):
        Shampoo(base, lr=0.1)
    with pytest.raises(ValueError, match="bits"):
        Shampoo(base, bits=7)
    base.param_groups[0]["beta"] = 3.0
    with pytest.raises(ValueError, match="beta"):
        Shampoo(base)
    del base.param_groups[0]["beta"]
    assert dict(base.param_groups[0]) == before
    wrapped = Shampoo(base)
    for again in (wrapped, base):
        with pytest.raises(TypeError, match="already"):
            Shampoo(again)
    with pytest.raises(TypeError, match="LBFGS"):
        Shampoo([parameter()], base="torch.optim.LBFGS")


def test_a_bad_group_added_later_changes_nothing() -> None:
    optimizer = Shampoo([parameter()], lr=0.1)
    with pytest.raises(ValueError, match="bits"):
        optimizer.add_param_group({"params": [parameter()], "bits": 5})
    assert len(optimizer.param_groups) == 1


def test_schedule_free_bases_switch_modes() -> None:
    pytest.importorskip("schedulefree")
    for name in ("schedulefree-adamw", "schedulefree-sgd"):
        p = parameter()
        optimizer = Shampoo([p], base=name, lr=0.1, update_every=1, refresh_every=2)
        optimizer.train()
        trained(optimizer, p)
        training = p.detach().clone()
        optimizer.eval()
        assert not torch.equal(p, training)
        optimizer.train()
        assert torch.allclose(p, training)
    plain = Shampoo([parameter()], lr=0.1)
    plain.train()
    plain.eval()


def test_8_bit_adamw_keeps_8_bit_state() -> None:
    pytest.importorskip("bitsandbytes")
    p = parameter()
    optimizer = Shampoo([p], base="adamw8bit", lr=1e-2, update_every=1, refresh_every=2)
    before = p.detach().clone()
    trained(optimizer, p)
    assert not torch.equal(p, before)
    assert optimizer.state[p]["base"]["state1"].dtype == torch.uint8


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    missing = {"bitsandbytes", "torchao", "schedulefree"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name in missing else find_spec(name, *a),
    )
    with pytest.raises(ImportError, match=r"pip install bitsandbytes.*pip install torchao"):
        Shampoo([parameter()], base="adamw8bit", lr=0.1)
    with pytest.raises(ImportError, match="pip install schedulefree"):
        Shampoo([parameter()], base="schedulefree-adamw", lr=0.1)


def test_a_broken_package_is_reported_and_the_other_one_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object())
    for package in ("bitsandbytes", "bitsandbytes.optim", "torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"bitsandbytes cannot be imported.*torchao cannot be"):
        Shampoo([parameter()], base="adamw8bit", lr=0.1)


def test_torchao_replaces_a_missing_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class AdamW8bit(torch.optim.AdamW):
        pass

    module = type(sys)("torchao.optim")
    module.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    package = type(sys)("torchao")
    package.optim = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.optim", module)
    monkeypatch.setattr(importlib.util, "find_spec", {"torchao": object()}.get)
    assert first_order.NAMES["adamw8bit"][0]() is AdamW8bit


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on another device."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_counters_of_the_base_stay_on_the_host() -> None:
    """After a resume, Lightning moves all state to the device, so F would wait at every step."""
    p = parameter()
    optimizer = Shampoo([p], base="adamw", lr=1e-2)
    trained(optimizer, p)
    base = optimizer.state[p]["base"]
    optimizer.state[p]["base"] = {**base, "step": base["step"].as_subclass(Elsewhere)}
    trained(optimizer, p)
    assert type(optimizer.base.state[p]["step"]) is torch.Tensor
    assert optimizer.base.state[p]["step"] == 6


def test_counters_on_the_device_move_with_their_parameter() -> None:
    """Fused and capturable implementations keep counters on the parameter's device."""
    step = torch.tensor(1.0)
    old = {"exp_avg": torch.empty(2, device="meta"), "step": step}
    new = {"exp_avg": torch.empty(2), "step": step.as_subclass(Elsewhere)}
    _keep_on_host(old, new, torch.device("cpu"))
    assert type(new["step"]) is Elsewhere
