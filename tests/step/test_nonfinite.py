"""Non-finite and extreme gradients: each value of the option, warnings, and fallbacks."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from support.numerics import no_host_sync, slow
from torch import Tensor, nn

from kronbit import CASPR, Shampoo

BAD = [math.nan, math.inf, -math.inf, 1e30]  # the square of 1e30 overflows float32
pytestmark = pytest.mark.filterwarnings("ignore:.*non-finite gradient:RuntimeWarning")


def build(device: torch.device, make: Any = Shampoo, **options: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    shapes = [(70, 66), (130, 64), (9,), (70, 66)]
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return params, make(base, max_order=100, **{"update_every": 1, "refresh_every": 2, **options})


def feed(params: list[Tensor], t: int) -> None:
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(100 * t + i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def blocks(optimizer: Any, p: Tensor) -> dict[str, Any]:
    return {k: v for k, v in optimizer.state[p].items() if k.startswith("block")}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("when", [0, pytest.param(1, marks=slow), 3])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_zero_discards_one_bad_gradient(
    bad: float, when: int, which: int, device: torch.device
) -> None:
    """G̃ becomes zero and the statistics do not change. Other parameters are not affected."""
    params, optimizer = build(device)
    twins, reference = build(device)
    for t in range(5):
        feed(params, t)
        feed(twins, t)
        if t == when:
            before = copy.deepcopy(blocks(optimizer, params[which])) if t else None
            params[which].grad.view(-1)[-1] = bad
            optimizer.step()
            assert torch.equal(params[which].grad, torch.zeros_like(params[which]))
            after = blocks(optimizer, params[which])
            for key, block in (before or {}).items():
                for side, leaves in block.items():
                    for name, leaf in leaves.items():
                        if not name.startswith("root"):
                            assert torch.equal(leaf, after[key][side][name]), name
        else:
            optimizer.step()
        reference.step()
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            if i != which:
                assert torch.equal(p, q), (t, i)
            assert torch.isfinite(p).all()
    assert optimizer.diagnostics()["skipped_gradients"] == 1


@pytest.mark.parametrize("make", [Shampoo, CASPR])
@pytest.mark.parametrize("mode", ["zero", "pass"])
def test_bad_gradients_in_all_parameters_never_enter_the_statistics(
    make: Any, mode: str, device: torch.device
) -> None:
    params, optimizer = build(device, make, nonfinite=mode)
    for t in range(4):
        feed(params, t)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    for p in params:
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    after = optimizer.state_dict()["state"]
    for index in (0, 1, 3):
        for key, block in before[index].items():
            if key.startswith("block"):
                for side, leaves in block.items():
                    for name in leaves.keys() - {"root_diagonal", "root_codes", "root_scales"}:
                        assert torch.equal(leaves[name], after[index][key][side][name])
    assert all(torch.isfinite(p).all() for p in params) == (mode == "zero")
    assert optimizer.diagnostics()["skipped_gradients"] == 4


def test_pass_leaves_the_gradient_unchanged(device: torch.device) -> None:
    params, optimizer = build(device, nonfinite="pass")
    for t in range(3):
        feed(params, t)
        optimizer.step()
    feed(params, 3)
    params[1].grad[100, 3] = math.inf
    params[2].grad[0] = math.nan
    expected = [p.grad.clone() for p in params]
    optimizer.step()
    for i in (1, 2):
        assert torch.equal(params[i].grad.nan_to_num(), expected[i].nan_to_num())
    assert not torch.equal(params[0].grad, expected[0])
    assert optimizer.diagnostics()["skipped_gradients"] == 2


def test_raise_names_the_parameter_and_changes_nothing(device: torch.device) -> None:
    params, optimizer = build(device, nonfinite="raise")
    for t in range(3):
        feed(params, t)
        optimizer.step()
    feed(params, 3)
    params[1].grad[100, 3] = math.inf
    weights, grads = ([x.clone() for x in xs] for xs in (params, [p.grad for p in params]))
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        FloatingPointError, match=r"group 0, parameter 1 at its step 4; nothing was changed"
    ):
        optimizer.step()
    for p, weight, grad in zip(params, weights, grads, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(p.grad, grad)
    assert_same_state(state["state"], optimizer.state_dict()["state"])
    assert optimizer.diagnostics()["skipped_gradients"] == 0
    params[1].grad[100, 3] = 0.0
    optimizer.step()


def test_the_warning_comes_once() -> None:
    params, optimizer = build(torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(6):
            feed(params, t)
            if t in (1, 3):
                params[0].grad[0, 0] = math.nan
            optimizer.step()
    (warning,) = [w for w in caught if w.category is RuntimeWarning]
    assert str(warning.message) == (
        "1 non-finite gradient(s) so far: kept out of the statistics; see "
        "diagnostics()['skipped_gradients'] and the option 'nonfinite'"
    )
    assert warning.filename == __file__  # the warning points to the caller of step()


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device_and_warns_later() -> None:
    params, optimizer = build(torch.device("cuda"), update_every=3, refresh_every=3)
    feed(params, 0)
    params[0].grad[0, 0] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        for t in (1, 2):
            feed(params, t)
            optimizer.step()
        # Step 4 neither updates nor refreshes.
        feed(params, 3)
        with no_host_sync():
            optimizer.step()
    assert len([w for w in caught if "non-finite" in str(w.message)]) == 1


def test_an_overflowing_product_falls_back_to_the_gradient(device: torch.device) -> None:
    """After statistics of tiny gradients, L̂ G R̂ of a larger gradient overflows float32."""
    p = nn.Parameter(torch.zeros(64, 66, device=device))
    optimizer = Shampoo(torch.optim.SGD([p], lr=1.0), update_every=1, refresh_every=1, beta=0)
    p.grad = 1e-19 * torch.randn(64, 66, device=device)
    optimizer.step()
    optimizer.param_groups[0]["update_every"] = optimizer.param_groups[0]["refresh_every"] = 1000
    grad = 1e17 * torch.randn(64, 66, device=device)
    p.grad = grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, grad)
    assert optimizer.diagnostics()["ungrafted"] == 1
    assert optimizer.diagnostics()["skipped_gradients"] == 0


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-15, 1e15])
@pytest.mark.parametrize("bits", [32, 4])
def test_extreme_but_finite_gradients_stay_finite(
    scale: float, bits: int, device: torch.device
) -> None:
    params, optimizer = build(device, bits=bits)
    for t in range(6):
        feed(params, t)
        for p in params:
            p.grad.mul_(scale)
        optimizer.step()
        assert all(torch.isfinite(p.grad).all() for p in params)
        assert all(torch.isfinite(p).all() for p in params)


@pytest.mark.parametrize("kind", ["rank one", "repeated", "one element", "equal eigenvalues"])
@pytest.mark.parametrize(("method", "bits"), [("eigen", 4), ("naive", 4), ("dense", 32)])
def test_degenerate_gradients_stay_finite(kind: str, method: str, bits: int) -> None:
    params, optimizer = build(torch.device("cpu"), method=method, bits=bits)
    torch.manual_seed(0)
    for _ in range(6):
        for p in params:
            rows = p.shape[0]
            grad = torch.ones_like(p)
            if kind == "one element":
                grad = torch.zeros_like(p)
                grad.view(-1)[3] = 1.0
            elif kind == "rank one" and p.dim() == 2:
                grad = torch.randn(rows, 1) @ torch.randn(1, p.shape[1])
            elif kind == "equal eigenvalues" and p.dim() == 2:
                grad = torch.eye(*p.shape)
            p.grad = grad.clone()
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in params)
    counts = optimizer.diagnostics()
    assert counts["skipped_gradients"] == counts["discarded_roots"] == 0
