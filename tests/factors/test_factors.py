"""Stacks of factors against the oracle's single matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import oracle
from support.networks import assert_same_state
from support.numerics import METHODS, PAPER, relative_error, slow
from support.stacks import all_rows, all_trusted, codes, gram, refresh, run_both, stack, update

from kronbit.config import Config
from kronbit.factors import Batch, Factors


@pytest.mark.parametrize(("method", "bits"), METHODS)
@pytest.mark.parametrize(
    "n", [1, pytest.param(20, marks=slow), 64, pytest.param(65, marks=slow), 131]
)
def test_updates_and_roots_match_the_oracle(
    method: str, bits: int, n: int, device: torch.device
) -> None:
    ours, references = run_both(n, device, torch.float64, method=method, bits=bits, damping=0.1)
    A, roots = ours.method.matrix(ours.tensors), ours.roots(all_rows(ours))
    for row, factor in enumerate(references):
        # `matrix` takes four Björck steps, and the oracle would take t1
        factor.o.update_rectify = 4
        # a code that rounding moves across a threshold adds an error of up to a few 1e-4
        tolerance = 1e-5 if bits == 32 or n < 64 else 1e-3
        assert relative_error(A[row], factor.matrix()) < tolerance
        assert relative_error(roots[row], factor.inverse_root()) < tolerance
        if "codes" in ours.tensors:
            actual = torch.tensor(codes(ours, "codes", row, bits))
            expected = torch.tensor([row_codes for row_codes, _ in factor.kept.rows])
            # near zero, values of neighbouring 8-bit codes differ by as little as rounding does
            assert (actual - expected).abs().max() <= 2
            assert (actual != expected).float().mean() < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"mapping": "dt"},
        {"mapping": "linear"},
        {"block_size": 16},
        {"block_size": 256},
        {"beta": 1},
        {"beta": 0.5, "qr_iterations": 3},
        {"update_rectify": 0, "refresh_rectify": 0},
        {"update_rectify": 2, "refresh_rectify": 1},
        {"root": "schur_newton", "newton_steps": 20},
        {"root": "schur_newton", "newton_steps": 20, "exponent": -0.5},
        {"exponent": -0.5},
        {"exponent": -1.0},
        {"trace_scaling": True},
        {"exponent": -0.5, "trace_scaling": True},
        {"root_bits": 8},
        {"root_bits": 32},
        {"min_quantized_numel": 10**6},
    ],
    ids=str,
)
def test_every_option_matches_the_oracle(options: dict[str, Any]) -> None:
    ours, references = run_both(
        70, torch.device("cpu"), torch.float64, method="eigen", damping=0.1, **options
    )
    for root, factor in zip(ours.roots(all_rows(ours)), references, strict=True):
        assert relative_error(root, factor.inverse_root()) < 1e-3


@pytest.mark.parametrize(("exponent", "scaled"), [(-0.5, False), (-1.0, False), (-0.5, True)])
@pytest.mark.parametrize(("method", "bits"), [("dense", 32), ("naive", 4), ("cholesky", 4)])
def test_other_exponents_match_the_oracle(
    method: str, bits: int, exponent: float, scaled: bool
) -> None:
    powers = {"exponent": exponent, "trace_scaling": scaled}
    options = {"method": method, "bits": bits, "damping": 0.1, **powers}
    ours, references = run_both(70, torch.device("cpu"), torch.float64, **options)
    for root, factor in zip(ours.roots(all_rows(ours)), references, strict=True):
        assert relative_error(root, factor.inverse_root()) < 2e-3


def test_trace_scaling_of_a_zero_statistic_gives_the_identity() -> None:
    config = Config(bits=32, damping=0.0, trace_scaling=True)
    factors = stack(5, 1, config)
    refresh(factors, config)
    assert torch.equal(factors.roots(slice(0, 1))[0], torch.eye(5))


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("n", [64, 67])
def test_codes_are_bitwise_equal_where_arithmetic_is_exact(bits: int, n: int) -> None:
    """M holds integers and β is 1/2, so float32 sums are exact and all codes must be equal."""
    options: dict[str, Any] = {"bits": bits, "beta": 0.5, "damping": 0.5}
    config = Config(method="naive", storage="paper", **options)
    ours = stack(n, 2, config)
    references = [
        oracle.Factor(n, oracle.Options(method="naive", **options), torch.float32) for _ in range(2)
    ]
    G = torch.randint(-3, 4, (2, n, n)).float()
    M = G @ G.mT
    update(ours, M, all_trusted(ours), config)
    for row, (factor, m) in enumerate(zip(references, M, strict=True)):
        factor.update(m)
        assert codes(ours, "codes", row, bits) == [list(c) for c, _ in factor.kept.rows]
        scales = torch.stack([torch.stack(scales) for _, scales in factor.kept.rows])
        assert torch.equal(ours.tensors["scales"][row], scales)
        assert factor.kept.diagonal is not None
        assert torch.equal(ours.tensors["diagonal"][row], factor.kept.diagonal)


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_eigen_codes_are_bitwise_equal_for_exact_eigenvectors(bits: int) -> None:
    """If A is diagonal, U remains I, and every mapping has codes for 1 and 0."""
    config = Config(bits=bits, **PAPER)
    ours = stack(66, 1, config)
    before = {name: tensor.clone() for name, tensor in ours.tensors.items()}
    diagonal = torch.arange(1, 67).float()
    update(ours, torch.diag(diagonal)[None], all_trusted(ours), config)
    assert torch.equal(ours.tensors["codes"], before["codes"])
    assert torch.equal(ours.tensors["scales"], before["scales"])
    expected = 0.95 * 1e-6 + 0.05 * diagonal
    assert torch.allclose(ours.tensors["eigenvalues"][0], expected, rtol=1e-6)


@pytest.mark.parametrize(("method", "bits"), METHODS)
@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_statistics_start_exactly_at_damping_times_identity(
    method: str, bits: int, n: int, device: torch.device
) -> None:
    factors = stack(n, 2, Config(method=method, bits=bits, damping=1e-3), device)
    eye = torch.eye(n, device=device)
    assert torch.equal(factors.roots(all_rows(factors)), eye.expand(2, n, n))
    assert factors.is_identity(all_rows(factors)).all()
    matrix = factors.method.matrix(factors.tensors)
    start = (eye * torch.tensor(1e-3)).expand(2, n, n)
    if device.type == "cpu" and method != "cholesky":
        assert torch.equal(matrix, start)
    else:  # a kernel multiplies λ with 22 bits; √ε is rounded
        assert torch.allclose(matrix, start, rtol=3e-7)


@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_rows_are_independent_of_each_other_and_of_the_batch(method: str, bits: int) -> None:
    """Results are bit-identical however the batch is cut.

    Rows of this order are aligned. LAPACK's triangular solve and QR round differently at unaligned
    addresses.
    """
    config = Config(method=method, bits=bits)
    whole, cut = stack(64, 5, config), stack(64, 5, config)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        M = gram(5, 64, generator)
        update(whole, M, all_trusted(whole), config)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 5)):
            update(cut, M[rows], all_trusted(cut)[rows], config, rows)
    refresh(whole, config)
    for rows in (slice(0, 2), slice(2, 5)):
        refresh(cut, config, rows)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, cut.tensors[name]), name


@pytest.mark.parametrize(("method", "bits"), METHODS)
@pytest.mark.parametrize("n", [20, 65])
def test_updates_that_are_not_trusted_or_not_finite_change_nothing(
    method: str, bits: int, n: int, device: torch.device
) -> None:
    config = Config(method=method, bits=bits)
    factors = stack(n, 4, config, device)
    M = gram(4, n, torch.Generator().manual_seed(0)).to(device)
    update(factors, M, all_trusted(factors), config)
    refresh(factors, config)
    before = {name: tensor.clone() for name, tensor in factors.tensors.items()}
    M[1] = torch.inf
    M[2] = torch.nan
    trusted = torch.tensor([True, True, True, False], device=device)
    assert update(factors, M, trusted, config) == 2
    for name, tensor in factors.tensors.items():
        assert torch.equal(tensor[1:], before[name][1:]), name
    first = next(iter(factors.tensors))
    assert not torch.equal(factors.tensors[first][0], before[first][0])


def test_a_bad_root_never_replaces_a_good_one() -> None:
    config = Config(damping=0.0, **PAPER)
    factors = stack(64, 2, Config(**PAPER))
    M = gram(2, 64, torch.Generator().manual_seed(0))
    update(factors, M, all_trusted(factors), config)
    refresh(factors, config)
    before = factors.roots(all_rows(factors)).clone()
    factors.tensors["eigenvalues"][1, 3] = 0.0  # 0^(-1/4) without damping
    factors.tensors["eigenvalues"][0] *= 2
    assert refresh(factors, config) == [True, False]
    after = factors.roots(all_rows(factors))
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_refresh_without_statistics_gives_the_identity(method: str, bits: int) -> None:
    """K-FAC starts from a zero statistic."""
    config = Config(method=method, bits=bits)
    factors = Factors(64, 1, config.format(64), 0.0, "cpu")
    refresh(factors, config)
    assert factors.is_identity(all_rows(factors)).all()


def test_eigenvalues_are_clamped_at_zero() -> None:
    config = Config(bits=32, method="eigen")
    factors = stack(8, 1, config)
    update(factors, -torch.eye(8)[None], all_trusted(factors), config)
    assert (factors.tensors["eigenvalues"] == 0).all()


def test_diagnostics_report_condition_and_orthogonality() -> None:
    config = Config(method="eigen")
    factors = stack(64, 2, config)
    M = gram(2, 64, torch.Generator().manual_seed(0))
    update(factors, M, all_trusted(factors), config)
    figures = factors.figures()
    lam = factors.tensors["eigenvalues"]
    assert figures["condition"] == pytest.approx(float((lam.amax(1) / lam.amin(1)).max()))
    assert 0 < figures["rectified_orthogonality_error"] < figures["orthogonality_error"] < 0.3
    dense = stack(20, 1, Config(bits=32))
    update(dense, M[:1, :20, :20], all_trusted(dense), Config(bits=32))
    assert dense.figures()["condition"] == pytest.approx(
        float(torch.linalg.cond(dense.tensors["matrix"][0].double())), rel=1e-3
    )
    triangle = stack(20, 1, Config(bits=32, method="cholesky"))
    update(triangle, M[:1, :20, :20], all_trusted(triangle), Config(bits=32, method="cholesky"))
    bound = triangle.figures()["condition_at_least"]
    assert 1 < bound <= dense.figures()["condition"]


def test_a_batch_of_parts_matches_separate_updates() -> None:
    """A batch updates windows of one stack in place and copies parts of other stacks."""
    config = Config(min_quantized_numel=0)
    M = gram(5, 20, torch.Generator().manual_seed(1))
    alone = stack(20, 5, config)
    update(alone, M, all_trusted(alone), config)
    whole, other = stack(20, 3, config), stack(20, 2, config)
    parts = [whole.window(0, 2), whole.window(2, 1), other]
    trusted = torch.ones(5, dtype=torch.bool)
    Batch([(part, slice(0, part.rows)) for part in parts]).update(M.clone(), trusted, config)
    for name, tensor in alone.tensors.items():
        assert torch.equal(torch.cat([whole.tensors[name], other.tensors[name]]), tensor), name
    adjacent = Batch([(part, slice(0, part.rows)) for part in parts[:2]])
    assert len(adjacent._slices) == 1
    assert parts[1].tensors["codes"].data_ptr() == whole.tensors["codes"][2].data_ptr()


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_mixed_orders_in_one_batch_match_separate_ones(
    trusted: bool, quantized: bool, device: torch.device
) -> None:
    assert_mixed_matches_separate("eigen", (3, 12, 49), trusted, quantized, device, updates=3)


@slow
@pytest.mark.parametrize(
    ("method", "quantized"), [("eigen", True), ("cholesky", True), ("cholesky", False)]
)
def test_kernels_take_several_orders_in_one_batch(
    method: Any, quantized: bool, kernels: torch.device
) -> None:
    """Results are bit-identical whatever other matrices are in the batch."""
    large = 130 if kernels.type == "cuda" else 70  # two interpreted tiles take a minute
    assert_mixed_matches_separate(
        method, (12, large), True, quantized, kernels, updates=1, exact=True
    )


@slow
@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_padding_does_not_hide_small_statistics(method: Any, kernels: torch.device) -> None:
    size, updates = 1e-16, 2 if kernels.type == "cuda" else 1
    assert_mixed_matches_separate(
        method, (12, 70), True, True, kernels, updates=updates, exact=True, size=size, damping=size
    )


def assert_mixed_matches_separate(
    method: Any,
    orders: tuple[int, ...],
    trusted: bool,
    quantized: bool,
    device: torch.device,
    updates: int,
    exact: bool = False,
    size: float = 1.0,
    damping: float = 1e-6,
) -> None:
    config = Config(
        method=method,
        damping=damping,
        update_every=1,
        refresh_every=1,
        min_quantized_numel=0 if quantized else 10**6,
    )
    generator = torch.Generator().manual_seed(3)
    alone = [stack(n, 2, config, device) for n in orders]
    mixed = [stack(n, 2, config, device) for n in orders]
    batch = Batch([(factors, slice(0, 2)) for factors in mixed])
    flags = torch.tensor([trusted, True] * len(orders), device=device)
    for _ in range(updates):
        M = torch.zeros(2 * len(orders), orders[-1], orders[-1], device=device)
        for i, factors in enumerate(alone):
            new = gram(2, factors.order, generator).to(device) * size
            M[2 * i : 2 * i + 2, : factors.order, : factors.order] = new
            assert update(factors, new, flags[:2], config) == 0
        batch.update(M, flags, config)
    together = mixed[0].method.allows_padding(config, None)
    if together:
        batch.refresh(config)
    for factors, other in zip(alone, mixed, strict=True):
        refresh(factors, config)
        if not together:
            refresh(other, config)
        if exact:
            assert_same_state(
                {0: other.slot(0), 1: other.slot(1)}, {0: factors.slot(0), 1: factors.slot(1)}
            )
        for separate, batched in (
            (factors.method.matrix(factors.tensors), other.method.matrix(other.tensors)),
            (factors.roots(all_rows(factors)), other.roots(all_rows(other))),
        ):
            # A code that rounding moves across a threshold adds an error of a few 1e-3 here.
            assert relative_error(batched, separate) < (1e-2 if quantized else 1e-4)
