"""State dicts with damaged or wrong entries are refused, and nothing changes."""

from __future__ import annotations

import copy
from functools import reduce
from operator import getitem
from typing import Any

import pytest
import torch
from support.checkpoints import FAST, network, run, saved
from support.networks import assert_same_state
from support.numerics import PAPER, slow
from torch import Tensor, nn

from kronbit import Shampoo


def damage(state: dict[str, Any], kind: str) -> str:
    """Damage a checkpoint and return a pattern of the expected message."""
    entry, groups = state["state"][0], state["param_groups"]
    left = entry["block_0"]["left"]
    if kind == "missing block":
        del entry["block_1"]
        return r"state\[0\]\['block_1'\] is missing.*max_order"
    if kind == "unknown block":
        entry["block_7"] = entry["block_0"]
        return r"state\[0\]\['block_7'\] does not exist here.*max_order"
    if kind == "missing side":
        del entry["block_0"]["right"]
        return r"state\[0\]\['block_0'\]\['right'\] is missing or not a dict"
    if kind == "missing tensor":
        del left["root_scales"]
        return r"state\[0\]\['block_0'\]\['left'\]\['root_scales'\] is missing"
    if kind == "truncated":
        left["codes"] = left["codes"][:-1]
        return r"\['left'\]\['codes'\] has shape \(65, 33\); expected \(66, 33\)"
    if kind == "dtype":
        left["codes"] = left["codes"].float()
        return r"\['left'\]\['codes'\] is torch.float32; expected a tensor of torch.uint8"
    if kind == "not a tensor":
        left["scales"] = [1.0]
        return r"\['left'\]\['scales'\] is list; expected a tensor"
    if kind == "nan":
        left["scales"][0, 0] = torch.nan
        return r"\['left'\]\['scales'\] holds non-finite values"
    if kind == "negative scale":
        left["scales"][0, 0] = -1.0
        return r"\['left'\]\['scales'\] holds negative values"
    if kind == "unknown tensor":
        left["extra"] = torch.zeros(3)
        return r"\['left'\]\['extra'\] is unknown; expected eigenvalues, codes"
    if kind == "base tensor missing":
        del entry["base"]["exp_avg_sq"]
        return r"state\[0\]\['base'\]\['exp_avg_sq'\] is missing: AdamW needs it"
    if kind == "base step missing":
        del entry["base"]["step"]
        return r"state\[0\]\['base'\]\['step'\] is missing: AdamW needs it"
    if kind == "unknown parameter":
        state["state"][77] = entry
        return r"state\[77\] belongs to no parameter"
    if kind == "no groups":
        del state["param_groups"]
        return "param_groups is missing: this is not a state dict"
    if kind == "no params":
        del groups[0]["params"]
        return r"param_groups\[0\]\['params'\] is missing"
    if kind == "base shape":
        entry["base"]["exp_avg"] = entry["base"]["exp_avg"][:-1]
        return r"state\[0\]\['base'\]\['exp_avg'\] has shape \(65, 130\); expected \(66, 130\)"
    if kind == "no base":
        del entry["base"]
        return r"state\[0\]\['base'\] is missing"
    if kind == "base kind":
        entry["base"] = 3
        return r"state\[0\]\['base'\] is int; expected a dict"
    if kind == "step":
        entry["step"] = -1
        return r"state\[0\]\['step'\] must be a whole number >= 0; got -1"
    if kind == "entry":
        state["state"][0] = None
        return r"state\[0\] is NoneType; expected a dict"
    if kind == "groups":
        groups.append(groups[0])
        return "has 2 param groups, the optimizer has 1"
    if kind == "group size":
        groups[0]["params"] = groups[0]["params"][:-1]
        return r"param_groups\[0\] has 5 parameters in the checkpoint and 6 in the optimizer"
    if kind == "later format":
        groups[0]["kronbit_format"] = 99
        return "kronbit_format=99; this version of kronbit reads formats 1 to 2"
    if kind == "bad options":
        groups[0]["bits"] = 5
        return "bits must be one of"
    assert kind == "other cut"
    groups[0]["max_order"] = 1200
    entry.clear()
    entry.update(step=4, base={}, block_0={"left": left, "right": left})
    return "expected|missing"


@pytest.mark.parametrize("fresh", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize(
    "kind",
    [
        "missing block",
        "unknown block",
        "missing side",
        "missing tensor",
        "truncated",
        "dtype",
        "not a tensor",
        "nan",
        "negative scale",
        "unknown tensor",
        "unknown parameter",
        "no groups",
        "no params",
        "base shape",
        "base tensor missing",
        "base step missing",
        "no base",
        "base kind",
        "step",
        "entry",
        "groups",
        "group size",
        "later format",
        "bad options",
        "other cut",
    ],
)
def test_damaged_state_is_refused_and_nothing_changes(kind: str, fresh: bool) -> None:
    state = small_checkpoint()
    message = damage(state, kind)
    assert_refused(state, message, fresh)


def small_checkpoint() -> Any:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, max_order=70, **PAPER, **FAST)
    run(model, optimizer, 4)
    return copy.deepcopy(saved(optimizer))


def assert_refused(state: Any, message: str, fresh: bool = False) -> None:
    twin = network()
    other = Shampoo(twin.parameters(), lr=3e-2, max_order=70, **PAPER, **FAST)
    reference_model = network()
    reference = Shampoo(reference_model.parameters(), lr=3e-2, max_order=70, **PAPER, **FAST)
    if not fresh:
        run(twin, other, 4)
        run(reference_model, reference, 4)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert_same_state(other.state_dict()["state"], reference.state_dict()["state"])
    run(twin, other, 4, first=4)
    run(reference_model, reference, 4, first=4)
    for p, q in zip(twin.parameters(), reference_model.parameters(), strict=True):
        assert torch.equal(p, q)


# Path of an entry in a state dict, its wrong value, and a pattern of the message.
WRONG_ENTRIES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("state",), None, "state is NoneType; expected a dict"),
    (("state",), [1], "state is list; expected a dict"),
    (("state", 0), torch.ones(3), r"state\[0\] is Tensor; expected a dict"),
    (("param_groups",), None, "param_groups is NoneType; expected a list"),
    (("param_groups", 0), "x", r"param_groups\[0\] is str; expected a dict"),
    (("param_groups", 0, "params"), None, r"\['params'\] must be a list of numbers or names"),
    (("param_groups", 0, "params", 0), [0], r"\['params'\] must be a list of numbers or names"),
    (("param_groups", 0, "lr"), float("nan"), r"\['lr'\] must be a number; got nan"),
    (("param_groups", 0, "lr"), float("inf"), r"\['lr'\] must be a finite number; got inf"),
    (("param_groups", 0, "lr"), None, r"\['lr'\] must be a finite number; got None"),
    (("param_groups", 0, "lr"), torch.ones(3), r"\['lr'\] must be a finite number; got tensor"),
    (("param_groups", 0, "betas"), (0.9,), r"\['betas'\] must have the length of \(0.9"),
    (("param_groups", 0, "update_every"), 2.5, r"param_groups\[0\]: update_every must"),
    (("param_groups", 0, "first_refresh"), "x", r"param_groups\[0\]: first_refresh must"),
    (("param_groups", 0, "lr"), torch.tensor(torch.nan), r"\['lr'\] must be a number; got tensor"),
    (("param_groups", 0, "lr"), "x", r"\['lr'\] must be a number, as 0.03 is; got 'x'"),
    (("param_groups", 0, "betas"), 3, r"\['betas'\] must be a sequence, as \(0.9.* got 3"),
    (("param_groups", 0, "betas"), (0.9, float("nan")), r"\['betas'\] must be a number; got \("),
    (("state", 0, "product_bits"), torch.ones(2), r"\['product_bits'\] must be one of"),
    (("state", 0, "product_bits"), "24", r"\['product_bits'\] must be one of"),
    (("state", 0, "block_0"), None, r"\['block_0'\] is NoneType; expected a dict"),
    (("state", 0, "block_0", "top"), {}, r"\['block_0'\]\['top'\] is unknown"),
    (("state", 0, "base", "exp_avg"), None, r"\['exp_avg'\] is NoneType; expected a tensor"),
    (("state", 0, "base", "exp_avg"), "a", r"\['exp_avg'\] is str; expected a tensor"),
    (("state", 0, "base", "step"), None, r"\['step'\] is NoneType; expected a tensor"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG_ENTRIES)
def test_wrong_entries_are_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    state = small_checkpoint()
    *parents, last = path
    reduce(getitem, parents, state)[last] = value
    assert_refused(state, message)


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("base", lambda t: t.to("meta"), "is on the meta device and has no data"),
        (
            "block_0",
            lambda t: t.to("meta"),
            "is on the meta device; expected a strided tensor with data",
        ),
        ("block_0", Tensor.to_sparse, "is torch.sparse_coo; expected a strided tensor with data"),
    ],
)
def test_tensors_without_data_are_refused(side: str, change: Any, message: str) -> None:
    state = small_checkpoint()
    leaves = state["state"][0][side]
    leaves = leaves if side == "base" else leaves["left"]
    leaves.update({name: change(value) for name, value in leaves.items()})
    assert_refused(state, message)


@pytest.mark.parametrize("names", [["a"], 5])
def test_too_few_parameter_names_are_refused_and_nothing_changes(names: Any) -> None:
    p = nn.Parameter(torch.randn(66, 40))
    optimizer = Shampoo([("weight", p), ("bias", nn.Parameter(torch.randn(3)))], lr=1e-2, **FAST)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(param_names=names, lr=0.7)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['param_names'\] must hold one name"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("state", [None, 5, [1]])
def test_only_a_dict_is_a_state_dict(state: Any) -> None:
    p = nn.Parameter(torch.randn(66, 40))
    with pytest.raises(ValueError, match="a state dict must be a dict; got "):
        Shampoo([p], lr=1e-2).load_state_dict(state)
