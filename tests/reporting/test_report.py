"""Summary, diagnostics and warnings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from kronbit import Shampoo


def build(**options: Any) -> tuple[nn.Module, Shampoo]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(130, 66), nn.LayerNorm(66), nn.Linear(66, 5))
    model[2].bias.requires_grad_(False)
    return model, Shampoo(model.named_parameters(), lr=1e-2, **options)


def run(model: nn.Module, optimizer: Shampoo, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 130)).square().mean().backward()
        optimizer.step()


def test_the_summary_lists_each_parameter_or_why_it_is_left_out() -> None:
    model, optimizer = build(max_order=100, first_refresh=7)
    text = optimizer.summary()
    rows = {line.split()[0]: line for line in text.splitlines() if ".weight" in line}
    assert "Shampoo around AdamW" in text
    run(model, optimizer, 1)
    sizes = {
        name: sum(
            leaf.numel() * leaf.element_size()
            for key, block in optimizer.state[p].items()
            if key.startswith("block")
            for side in block.values()
            for leaf in side.values()
        )
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    assert "66 x 130" in rows["0.weight"]
    assert "cholesky" in rows["0.weight"]
    assert "4/32" in rows["0.weight"]  # 130 is cut into 100 and 30; 30 stays in 32 bits
    assert f"{sizes['0.weight']:,}" in rows["0.weight"]
    assert "not a matrix" in rows["1.weight"]
    assert "frozen: requires_grad=False" in text
    assert "first preconditioned step: 7" in text
    assert f"second-order state: {sum(sizes.values()):,} bytes" in text
    total = sum(p.numel() for p in model.parameters())
    assert f"{66 * 130 + 66 * 5:,} of {total:,} elements" in text
    assert "workspace: 256 MiB; an update at the largest order, 100" in text


def test_the_summary_names_parameters_without_names_by_position() -> None:
    optimizer = Shampoo([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1, precondition=False)
    assert "group 0, parameter 0" in optimizer.summary()
    assert "precondition=False" in optimizer.summary()
    assert "first preconditioned step: never" in optimizer.summary()


def test_diagnostics_before_and_after_steps() -> None:
    model, optimizer = build(update_every=1, refresh_every=2, method="eigen")
    counters = (
        "skipped_gradients",
        "shifted_qr",
        "householder",
        "jittered",
        "redamped",
        "discarded_statistics",
        "discarded_roots",
        "ungrafted",
    )
    empty = optimizer.diagnostics()
    figures = {"kernels": {}, "cuda_graph": {}, "products": {}, "ranks": {}, "groups": []}
    assert empty == {**dict.fromkeys(counters, 0), **figures}
    run(model, optimizer, 3)
    diagnostics = optimizer.diagnostics()
    assert diagnostics["kernels"] == {"cpu": "no kernels for cpu"}
    assert diagnostics["products"] == {24: 2}
    assert [group["shape"] for group in diagnostics["groups"]] == [(66, 130), (5, 66)]
    for group in diagnostics["groups"]:
        assert group["blocks"] == 1
        assert group["device"] == "cpu"
        low, high = group["graft_ratio"]
        assert 0 < low <= high
        for side in ("left", "right"):
            assert group[side]["condition"] > 1
            assert group[side]["orthogonality_error"] < 0.5
    assert (
        sum(group["householder"] for group in diagnostics["groups"]) == diagnostics["householder"]
    )


def test_a_failed_capture_of_a_graph_is_reported() -> None:
    model, optimizer = build(update_every=1, refresh_every=2)
    run(model, optimizer, 1)
    assert optimizer.diagnostics()["cuda_graph"] == {"cpu": "not refused"}
    (guard,) = optimizer._guards.values()
    guard._replay.refused = "no room"
    assert optimizer.diagnostics()["cuda_graph"] == {"cpu": "no room"}


def test_the_graft_ratio_is_that_of_the_last_step() -> None:
    p = nn.Parameter(torch.zeros(64, 66))
    optimizer = Shampoo(torch.optim.SGD([p], lr=0.0), update_every=1, refresh_every=1)
    G = torch.randn(64, 66)
    p.grad = G.clone()
    optimizer.step()
    (group,) = optimizer._keeper.plan.preconditioners[p.device].stacks.groups
    L, R = (factors.roots(slice(0, 1))[0] for factors in (group.left, group.right))
    expected = float(G.norm() / (L @ G @ R).norm())
    low, high = optimizer.diagnostics()["groups"][0]["graft_ratio"]
    assert low == high == pytest.approx(expected, rel=1e-5)


def test_counters_survive_a_new_plan() -> None:
    p = nn.Parameter(torch.zeros(64, 66))
    every = {"update_every": 1, "refresh_every": 1}
    optimizer = Shampoo([p], base="sgd", lr=0.1, method="eigen", **every)
    p.grad = torch.randn(64, 1) @ torch.randn(1, 66)
    optimizer.step()
    before = optimizer.diagnostics()["shifted_qr"]
    assert before > 0
    optimizer.add_param_group({"params": [q := nn.Parameter(torch.zeros(64, 66))]})
    p.grad, q.grad = None, torch.diag(torch.arange(1.0, 65.0)) @ torch.eye(64, 66)
    optimizer.step()
    assert optimizer.diagnostics()["shifted_qr"] >= before


@pytest.mark.parametrize("enough", [5e-6, 1.0])
def test_a_root_that_does_not_converge_is_retried_with_more_damping(
    enough: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronbit.factors import cholesky

    original = cholesky.converged_inverse_root

    def only_from(A: torch.Tensor, p: int, damping: float, orders: None) -> torch.Tensor:
        root = original(A, p, damping, orders)
        return root if damping >= enough else root * torch.nan

    p = nn.Parameter(torch.zeros(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=1, refresh_every=1)
    monkeypatch.setattr(cholesky, "converged_inverse_root", only_from)
    p.grad = torch.randn(64, 66)
    optimizer.step()
    diagnostics = optimizer.diagnostics()
    assert diagnostics["redamped"] == 2
    assert diagnostics["discarded_roots"] == (2 if enough == 1 else 0)
    left = optimizer._keeper.plan.preconditioners[p.device].stacks.groups[0].left
    assert bool(left.is_identity(slice(0, 1))) == (enough == 1)


def test_few_preconditioned_elements_give_one_warning() -> None:
    """The warning names a flattened matrix and shows the summary."""
    flat = [nn.Parameter(torch.ones(2**17)), nn.Parameter(torch.ones(8, 8))]
    optimizer = Shampoo(flat, lr=0.1)
    for p in flat:
        p.grad = torch.ones_like(p)
    message = (
        r"(?s)only 0\.0 % of 131,136 elements are preconditioned\. group 0, parameter 0 is a "
        "vector of 131,072 elements: if .* use fully_shard .*not a matrix"
    )
    with pytest.warns(RuntimeWarning, match=message):
        optimizer.step()
    groups = [{"params": flat[:1], "precondition": False}, {"params": flat[1:]}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        Shampoo(groups, lr=0.1).step()
