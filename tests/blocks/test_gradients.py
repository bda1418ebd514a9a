"""Gradients of every layout and dtype are preconditioned, in place or with the originals kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.networks import FAST, backward, network, run, same, weights
from support.numerics import relative_error
from torch import nn

from kronbit import CASPR, Shampoo
from kronbit.blocks.gradients import plain_dtypes


def test_gradients_are_preconditioned_in_place_or_kept(device: torch.device) -> None:
    for keep in (False, True):
        model = network(device)
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = Shampoo(base, keep_gradients=keep, **FAST)
        run(model, optimizer, 4)
        optimizer.zero_grad()
        backward(model, 4)
        grads = {p: p.grad for p in model.parameters()}
        before = {p: g.clone() for p, g in grads.items() if g is not None}
        optimizer.step()
        for p, grad in before.items():
            assert p.grad is grads[p]
            assert torch.equal(p.grad, grad) == (keep or p.dim() < 2 or p.numel() == 0)
            if p.numel():
                assert p.grad.norm().item() == pytest.approx(grad.norm().item(), rel=1e-5)


def test_keeping_gradients_changes_nothing_else() -> None:
    final = []
    for keep in (False, True):
        model = network()
        run(model, Shampoo(model.parameters(), lr=1e-2, keep_gradients=keep, **FAST), 6)
        final.append(weights(model))
    assert same(*final)


def test_kept_gradients_are_restored_if_the_base_fails() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise MemoryError

    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = Shampoo(Failing([p], lr=1.0), keep_gradients=True, update_every=1, refresh_every=1)
    p.grad = grad = torch.randn(4, 4)
    before = grad.clone()
    with pytest.raises(MemoryError):
        optimizer.step()
    assert p.grad is grad
    assert torch.equal(grad, before)


def test_memory_format_of_convolutions_does_not_matter(device: torch.device) -> None:
    start = torch.randn(66, 70, 3, 3, device=device)
    grads = [torch.randn(66, 70, 3, 3, device=device) for _ in range(3)]
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone(memory_format=layout))
        optimizer = Shampoo([p], base="sgd", lr=0.1, max_order=100, update_every=1, refresh_every=2)
        for grad in grads:
            p.grad = grad.clone(memory_format=layout)
            optimizer.step()
            assert p.grad.is_contiguous(memory_format=layout)
        results.append(p.detach())
    assert relative_error(*results) < 1e-6


def test_only_unusual_gradients_are_inspected_one_by_one() -> None:
    """Inspecting every gradient would take the host longer than the rest of the step."""
    single, last = {torch.float32}, torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    volume = torch.randn(6, 4, 3, 3, 2).to(memory_format=torch.channels_last_3d)
    assert plain_dtypes([torch.randn(3, 4), last, volume]) == single
    assert plain_dtypes([last.half()]) == {torch.float16}
    for unusual in (
        torch.randn(3, 4).t(),
        last[:, ::2],
        torch.randn(1, 4, 3, 3).expand(6, 4, 3, 3),
        torch.randn(3, 4).to_sparse(),
        torch.randn(3, 4, dtype=torch.complex64),
    ):
        assert plain_dtypes([last, unusual]) is None


@pytest.mark.parametrize("kind", ["transposed", "expanded row", "expanded scalar", "strided"])
def test_results_do_not_depend_on_the_strides_of_gradients(kind: str) -> None:
    start = torch.randn(70, 66)
    unusual = {
        "transposed": torch.randn(66, 70).t(),
        "expanded row": torch.randn(1, 66).expand(70, 66),
        "expanded scalar": torch.ones(1, 1).expand(70, 66),
        "strided": torch.randn(140, 132)[::2, ::2],
    }[kind]
    results = []
    for grad in (unusual, unusual.clone(memory_format=torch.contiguous_format)):
        p = nn.Parameter(start.clone())
        optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=1, refresh_every=1)
        p.grad = grad
        optimizer.step()
        results.append(p.detach())
    assert relative_error(*results) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_state_is_float32_for_every_parameter_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Up to the rounding of its dtype, G̃ is that of a float32 parameter."""
    start, grads = torch.randn(70, 66), [torch.randn(70, 66).to(dtype) for _ in range(3)]
    results = []
    for p_dtype in (dtype, torch.float32):
        p = nn.Parameter(start.clone().to(device=device, dtype=p_dtype))
        base = torch.optim.SGD([p], lr=1e-2)
        optimizer = Shampoo(base, damping=0.1, update_every=1, refresh_every=2)
        for grad in grads:
            p.grad = grad.to(device=device, dtype=p_dtype, copy=True)
            optimizer.step()
        results.append(p.grad)
        leaves = optimizer.state[p]["block_0"]["left"]
        assert {leaf.dtype for leaf in leaves.values()} == {torch.float32, torch.uint8}
    rounding = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 1e-6)
    assert relative_error(*results) < rounding


def test_grafting_is_per_parameter_over_all_blocks() -> None:
    """The blocks' gradients have very different norms. Grafting per block would keep the ratio."""
    p = nn.Parameter(torch.zeros(20, 40))
    optimizer = Shampoo(
        torch.optim.SGD([p], lr=1.0), max_order=20, update_every=1, refresh_every=1, damping=1e-4
    )
    G = torch.randn(20, 40)
    G[:, 20:] *= 100
    p.grad = G.clone()
    optimizer.step()
    assert p.grad.norm().item() == pytest.approx(G.norm().item(), rel=1e-5)
    ratio = float(p.grad[:, 20:].norm() / p.grad[:, :20].norm())
    assert ratio < 20


@pytest.mark.parametrize("make", [Shampoo, CASPR])
def test_zero_gradients_do_not_change_weights(make: Any) -> None:
    p = nn.Parameter(torch.randn(8, 70))
    optimizer = make(torch.optim.SGD([p], lr=1.0), update_every=1, refresh_every=1)
    before = p.detach().clone()
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p.detach(), before)
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert torch.isfinite(p).all()


def test_float16_gradients_saturate_instead_of_overflowing(device: torch.device) -> None:
    """G̃ has the norm of G, but one of its elements may be larger than any of G's."""
    p = nn.Parameter(torch.zeros(64, 64, dtype=torch.float16, device=device))
    optimizer = Shampoo(torch.optim.SGD([p], lr=1e-6), update_every=1, refresh_every=2)
    for _ in range(4):
        grad = 1e4 * torch.randn(64, 64, device=device)
        grad[0] = grad[:, 0] = 0.0
        p.grad = grad.half()
        optimizer.step()
    optimizer.param_groups[0]["update_every"] = optimizer.param_groups[0]["refresh_every"] = 100
    grad[0, 0] = 3e4
    p.grad = grad.half()
    optimizer.step()
    assert p.grad.abs().max() == 65504.0
    assert torch.isfinite(p).all()


def test_errors_for_sparse_and_complex_gradients_name_a_remedy() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Shampoo(embedding.named_parameters(), base="sgd", lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"gradient of weight is sparse.*sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    optimizer.param_groups[0]["precondition"] = False
    optimizer.step()
    assert not torch.equal(embedding.weight, before)

    p = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0 is complex.*view_as_real"):
        optimizer.step()
    optimizer.param_groups[0]["precondition"] = False
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(4, 4, dtype=torch.complex64))
    vector = nn.Parameter(torch.ones(4, dtype=torch.complex64))  # F alone updates vectors
    optimizer = Shampoo([vector], base="sgd", lr=0.1)
    vector.grad = torch.ones_like(vector)
    optimizer.step()
    assert not torch.equal(vector.detach(), torch.ones(4, dtype=torch.complex64))


def test_parameters_without_gradient_do_not_advance() -> None:
    """A parameter that has no gradient at some steps trains as if these steps did not exist."""
    missing, always = nn.Parameter(torch.ones(70, 66)), nn.Parameter(torch.ones(70, 66))
    alone = nn.Parameter(torch.ones(70, 66))
    together = Shampoo([missing, always], base="sgd", lr=0.1, **FAST)
    single = Shampoo([alone], base="sgd", lr=0.1, **FAST)
    for t in range(10):
        grad = torch.randn(70, 66)
        missing.grad = grad.clone() if t % 2 else None
        always.grad = torch.randn(70, 66)
        together.step()
        if t % 2:
            alone.grad = grad.clone()
            single.step()
    assert together.state[missing]["step"] == 5
    assert together.state[always]["step"] == 10
    assert torch.equal(missing, alone)


def test_zero_grad_to_none_and_to_zero_agree() -> None:
    """Gradients that are zeroed in place hold G̃ until then, which does not affect the run."""
    results = []
    for set_to_none in (True, False):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
        for t in range(7):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, t)
            optimizer.step()
        results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("workspace_mb", [1e6, 1, 0.05, 0])
def test_the_workspace_does_not_change_results(workspace_mb: float) -> None:
    """Batches may end anywhere, and a parameter may be larger than the workspace."""
    shapes = [(64, 64), (200, 150), (5, 70, 66), (64, 64), (130, 64)]
    final = []
    for size in (256, workspace_mb):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        groups = [{"params": params[:2] + params[3:]}, {"params": params[2:3], "batch_dims": 1}]
        optimizer = Shampoo(
            groups,
            base="sgd",
            lr=0.1,
            max_order=64,
            workspace_mb=size,
            update_every=1,
            refresh_every=2,
            damping=0.1,
        )
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape) * 0.1
            optimizer.step()
        final.append([p.detach() for p in params])
    assert max(relative_error(a, b) for a, b in zip(*final, strict=True)) < 1e-5
