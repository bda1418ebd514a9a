"""Under hard gradients, as in failing runs, states stay finite and other parameters unaffected."""

from __future__ import annotations

import copy
import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support import oracle
from support.networks import assert_same_state
from support.numerics import METHODS, angle, orthogonal, relative_error, slow
from torch import Tensor, nn

from kronbit import CASPR, KFAC, AdaBK, Shampoo

SHAPES = [(24, 20), (70, 66), (7,), (6, 5, 3, 3)]
KINDS = [
    "ordinary",
    "nan",
    "inf",
    "-inf",
    "huge",
    "denormal",
    "zero",
    "rank one",
    "repeated",
    "one element",
    "equal eigenvalues",
    "condition 1e20",
]
pytestmark = pytest.mark.filterwarnings("ignore:.*non-finite gradient:RuntimeWarning")


def gradient(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "repeated":
        generator.manual_seed(17)
    grad = torch.randn(shape, generator=generator)
    bad = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 3e38}
    if kind in bad:
        grad.view(-1)[seed % grad.numel()] = bad[kind]
    elif kind == "denormal":
        grad *= 1e-40
    elif kind == "zero":
        grad.zero_()
    elif kind == "one element":
        grad = torch.zeros(shape)
        grad.view(-1)[seed % grad.numel()] = 1.0
    elif kind in ("rank one", "equal eigenvalues", "condition 1e20") and len(shape) > 1:
        U, s, Vh = torch.linalg.svd(grad.flatten(1).double(), full_matrices=False)
        if kind == "rank one":
            s[1:] = 0.0
        elif kind == "equal eigenvalues":
            s.fill_(1.0)
        else:  # the condition of G Gᵀ is the square of that of G
            s = torch.logspace(0, -10, len(s), dtype=torch.float64)
        grad = ((U * s) @ Vh).float().view(shape)
    return grad


def build(make: Any = Shampoo, **options: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    base = torch.optim.AdamW(params, lr=1e-2)
    defaults = {"max_order": 40, "update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}
    return params, make(base, **{**defaults, **options})


def examples(count: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=count, deadline=None, database=None, derandomize=True)


steps = st.lists(
    st.tuples(st.integers(0, len(SHAPES) - 1), st.sampled_from(KINDS)), min_size=2, max_size=8
)
methods = st.sampled_from(METHODS)


def check_any_gradient(walk: list[tuple[int, str]], method: tuple[str, int], make: Any) -> None:
    """Check that bad gradients do not affect other parameters and that the state can be loaded."""
    options = {"method": method[0], "bits": method[1], "storage": "paper"}
    params, optimizer = build(make, **options)
    twins, reference = build(make, **options)
    affected = set()
    for t, (number, kind) in enumerate(walk):
        affected |= {number} if kind != "ordinary" else set()
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            q.grad = gradient("ordinary", p.shape, 100 * t + i)
            p.grad = gradient(kind, p.shape, 100 * t + i) if i == number else q.grad.clone()
        optimizer.step()
        reference.step()
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            assert torch.isfinite(p).all(), (t, i)
            assert i in affected or torch.equal(p, q), (t, i)
    # Loading refuses state that is not finite or does not fit.
    _, resumed = build(make, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(resumed.state_dict()["state"], optimizer.state_dict()["state"])


@examples(15)
@hypothesis.given(steps, methods, st.sampled_from([Shampoo, CASPR]))
def test_state_stays_valid_for_any_gradient(
    walk: list[tuple[int, str]], method: tuple[str, int], make: Any
) -> None:
    check_any_gradient(walk, method, make)


# Scales of a layer's inputs.
INPUTS = {"ordinary": 1.0, "zero": 0.0, "denormal": 1e-40, "huge": 1e30, "inf": math.inf}
INPUTS |= {"nan": math.nan}


@examples(10)
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from([*INPUTS]), st.sampled_from(KINDS)), min_size=2, max_size=6),
    st.sampled_from([KFAC, AdaBK]),
)
def test_hard_inputs_and_gradients_do_not_affect_other_layers(
    walk: list[tuple[str, str]], make: Any
) -> None:
    def build() -> tuple[nn.ModuleList, Any]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(20, 24), nn.Linear(12, 9)])
        base = torch.optim.AdamW(model.parameters(), lr=1e-2)
        every = {"update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}
        return model, make(base, model=model, **every)

    (model, optimizer), (twin, reference) = build(), build()
    for t, (inputs, kind) in enumerate(walk):
        generator = torch.Generator().manual_seed(t)
        x, y = torch.randn(8, 20, generator=generator), torch.randn(8, 12, generator=generator)
        for network, scale in ((model, INPUTS[inputs]), (twin, 1.0)):
            network.zero_grad()
            sum(
                layer(z).square().mean() for layer, z in zip(network, (scale * x, y), strict=True)
            ).backward()
        if kind != "ordinary":
            model[0].weight.grad = gradient(kind, (24, 20), t)
        optimizer.step()
        reference.step()
        assert all(torch.isfinite(p).all() for p in model.parameters()), t
        assert all(map(torch.equal, model[1].parameters(), twin[1].parameters())), t
    _, resumed = build()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(resumed.state_dict()["state"], optimizer.state_dict()["state"])


@slow
@examples(500)
@hypothesis.given(steps, methods, st.sampled_from([Shampoo, CASPR]))
def test_state_stays_valid_for_many_gradients(
    walk: list[tuple[int, str]], method: tuple[str, int], make: Any
) -> None:
    check_any_gradient(walk, method, make)


@pytest.mark.parametrize("bits", [4, 32])
def test_exploding_and_vanishing_gradients_are_forgotten(bits: int) -> None:
    """Gradients are scaled by 1, 1e15, 1e-25 and 1 again. Later steps match a normal run."""
    params, optimizer = build(bits=bits, beta=0.2, refresh_every=6)
    others, reference = build(bits=bits, beta=0.2, refresh_every=6)
    for t in range(72):  # 0.2⁶⁰ (1e15)² is 1e-12
        scale = 1.0 if t < 4 else 1e15 if t < 8 else 1e-25 if t < 12 else 1.0
        for group, factor in ((params, scale), (others, 1.0)):
            for i, p in enumerate(group):
                p.grad = factor * gradient("ordinary", p.shape, 100 * t + i)
        optimizer.step()
        reference.step()
        assert all(torch.isfinite(p).all() for p in params)
    for p, q in zip(params, others, strict=True):
        if bits == 32:
            assert p.grad is not None
            assert q.grad is not None
            assert angle(p.grad, q.grad) < 0.01  # gradients now hold G̃
        elif "block_0" in optimizer.state[p]:  # codes differ, so compare the size of L
            actual, expected = (
                owner.state[r]["block_0"]["left"]["diagonal"].norm()
                for owner, r in ((optimizer, p), (reference, q))
            )
            assert 0.5 < actual / expected < 2.0
    assert optimizer.diagnostics()["skipped_gradients"] == 0


@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_equal_eigenvalues_keep_the_direction(method: str, bits: int) -> None:
    """If L and R are multiples of the identity, L̂ G R̂ is a multiple of G."""
    p = nn.Parameter(torch.zeros(64, 64))
    options = {"method": method, "bits": bits, "storage": "paper", "min_quantized_numel": 0}
    optimizer = Shampoo(torch.optim.SGD([p], lr=1.0), update_every=1, refresh_every=1, **options)
    for t in range(4):
        torch.manual_seed(t)
        G = orthogonal(64, 64, dtype=torch.float32)
        p.grad = G.clone()
        optimizer.step()
        assert angle(p.grad, G) < (5.0 if bits < 6 else 1.0 if bits < 32 else 0.01)


def test_a_condition_of_1e20_matches_the_oracle() -> None:
    """Damping covers the eigenvalues of L that float32 cannot distinguish from zero."""
    p, q = nn.Parameter(torch.zeros(40, 36)), nn.Parameter(torch.zeros(40, 36).double())
    options: dict[str, Any] = {"bits": 32, "method": "dense", "damping": 1e-4}
    options |= {"update_every": 1, "refresh_every": 1}
    optimizer = Shampoo(torch.optim.SGD([p], lr=1.0), **options)
    reference = oracle.Shampoo([q], torch.optim.SGD([q], lr=1.0), oracle.Options(**options))
    for t in range(5):
        grad = gradient("condition 1e20", (40, 36), t)
        p.grad, q.grad = grad.clone(), grad.double()
        optimizer.step()
        reference.step()
        assert relative_error(p.detach(), q.detach()) < 1e-2


def test_gradients_may_change_their_memory_format_at_every_step() -> None:
    def walk(change_format: bool) -> list[Tensor]:
        params, optimizer = build(bits=32)
        for t in range(6):
            for i, p in enumerate(params):
                grad = gradient("ordinary", p.shape, 100 * t + i)
                if change_format and p.dim() == 4 and t % 2:
                    grad = grad.to(memory_format=torch.channels_last)
                elif change_format and p.dim() == 2 and t % 3 == 1:
                    grad = grad.t().contiguous().t()
                p.grad = grad
            optimizer.step()
        return [p.detach() for p in params]

    # Norms are summed in memory order, so results are not bitwise equal.
    for actual, expected in zip(walk(True), walk(False), strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_parameters_may_change_their_dtype_between_steps() -> None:
    """Second-order state stays float32; gradients have the new dtype."""

    def walk(dtypes: list[torch.dtype]) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40, 36)), nn.Parameter(torch.randn(9))]
        base = torch.optim.SGD(params, lr=0.1)
        optimizer = Shampoo(base, bits=32, update_every=1, refresh_every=2)
        for t, dtype in enumerate(dtypes):
            for i, p in enumerate(params):
                p.grad = None
                p.data = p.data.to(dtype)
                p.grad = gradient("ordinary", p.shape, 100 * t + i).to(dtype)
            optimizer.step()
            for p in params:
                assert p.dtype == p.grad.dtype == dtype  # type: ignore[union-attr]
            block = optimizer.state[params[0]]["block_0"]["left"]
            assert {leaf.dtype for leaf in block.values()} == {torch.float32}
        assert optimizer.state[params[0]]["step"] == 9
        return [p.detach().double() for p in params]

    single, double, bf16 = torch.float32, torch.float64, torch.bfloat16
    expected = walk([single] * 9)
    wider = walk([single] * 3 + [double] * 3 + [single] * 3)
    narrower = walk([single] * 3 + [bf16] * 3 + [double] * 3)
    for exact, lossless, rounded in zip(expected, wider, narrower, strict=True):
        assert relative_error(lossless, exact) < 1e-5
        assert 1e-4 < relative_error(rounded, exact) < 1e-2  # weights are rounded to bf16
