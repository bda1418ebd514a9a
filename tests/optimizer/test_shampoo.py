"""Complete runs of the optimizers match the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import oracle
from support.numerics import PAPER, relative_error, slow
from torch import nn

from kronbit import CASPR, Shampoo

# matrix, several blocks, convolution, an axis of size 1, a vector, a scalar
SHAPES = [(70, 65), (130, 64), (66, 5, 3, 3), (2, 1, 80, 3), (9,), ()]
METHODS = [
    ("dense", 32, "paper"),
    ("eigen", 32, "paper"),
    ("eigen", 8, "paper"),
    ("eigen", 4, "paper"),
    ("eigen", 4, "compact"),
    ("eigen", 3, "paper"),
    ("naive", 4, "paper"),
    ("cholesky", 32, "paper"),
    ("cholesky", 8, "compact"),
    ("cholesky", 4, "compact"),
]
FEW = [("eigen", 4, "paper"), ("cholesky", 4, "compact")]
RULES = {"shampoo": Shampoo, "caspr": CASPR}
BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def run_both(
    rule: str, base: str, device: torch.device, steps: int, gradient_scale: float, **options: Any
) -> list[float]:
    """Return the relative error of each parameter's displacement, float32 against float64."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    params = [nn.Parameter(w.float().to(device)) for w in start]
    reference_params = [nn.Parameter(w.float().double()) for w in start]
    make, arguments = BASES[base]
    optimizer = RULES[rule](make(params, **arguments), **options)
    reference = oracle.Shampoo(
        reference_params, make(reference_params, **arguments), oracle.Options(**options), rule
    )
    for _ in range(steps):
        for p, q in zip(params, reference_params, strict=True):
            grad = torch.randn(q.shape, generator=generator).float() * gradient_scale
            p.grad, q.grad = grad.to(device), grad.double()
        optimizer.step()
        reference.step()
    return [
        relative_error(p.detach().cpu() - w.float(), q.detach() - w.float())
        for p, q, w in zip(params, reference_params, start, strict=True)
    ]


PAIRS = [("shampoo", "adamw"), ("caspr", "sgd"), ("shampoo", "sgd"), ("caspr", "adamw")]


@pytest.mark.parametrize(
    ("rule", "base", "method", "bits", "storage"),
    [
        # CASPR uses methods as Shampoo does: without a GPU, two methods are enough.
        pytest.param(
            *pair,
            *method,
            marks=() if method[1] in (4, 32) and (i == 0 or (i == 1 and method in FEW)) else slow,
        )
        for method in METHODS
        for i, pair in enumerate(PAIRS)
    ],
)
def test_runs_match_the_oracle(
    rule: str, base: str, method: str, bits: int, storage: str, device: torch.device
) -> None:
    """Steps 2, 4, 6 and 8 update; steps 3 and 6 refresh. Blocks have orders up to 100."""
    errors = run_both(
        rule,
        base,
        device,
        steps=8,
        gradient_scale=0.1,
        method=method,
        bits=bits,
        storage=storage,
        update_every=2,
        refresh_every=3,
        damping=0.1,
        max_order=100,
    )
    assert max(errors) < 1e-3


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_runs_with_an_initial_statistic_match_the_oracle(method: str) -> None:
    errors = run_both(
        "shampoo",
        "sgd",
        torch.device("cpu"),
        steps=4,
        gradient_scale=0.1,
        update_every=2,
        refresh_every=2,
        damping=0.1,
        start=3.0,
        max_order=100,
        method=method,
        storage="paper",
        bits=8,
    )
    assert max(errors) < 1e-3


@pytest.mark.parametrize("split", ["greedy", "even"])
@pytest.mark.parametrize(
    "max_order", [30, pytest.param(64, marks=slow), pytest.param(100, marks=slow)]
)
def test_every_cut_matches_the_oracle(split: str, max_order: int) -> None:
    errors = run_both(
        "shampoo",
        "sgd",
        torch.device("cpu"),
        steps=4,
        gradient_scale=0.1,
        update_every=1,
        refresh_every=2,
        damping=0.1,
        max_order=max_order,
        split=split,
        min_quantized_numel=900,
        **PAPER,
    )
    assert max(errors) < 1e-3


@pytest.mark.parametrize(("method", "tolerance"), [("dense", 1e-3), ("eigen", 0.05)])
def test_at_the_papers_damping_32_bit_runs_agree_as_far_as_rounding_allows(
    method: str, tolerance: float, device: torch.device
) -> None:
    """For gradients of low rank, rounding determines some eigenvectors, even in float64."""
    errors = run_both(
        "shampoo",
        "sgd",
        device,
        steps=8,
        gradient_scale=1.0,
        method=method,
        bits=32,
        update_every=2,
        refresh_every=3,
    )
    assert max(errors) < tolerance
