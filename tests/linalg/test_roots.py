"""Converged inverse roots match eigendecompositions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.numerics import relative_error, slow
from torch import Tensor
from torch.nn import functional

from kronbit import Shampoo
from kronbit.blocks.batches import CONVERGED_ROOT, batches, due_parts
from kronbit.blocks.blocking import route
from kronbit.blocks.groups import Due, Member
from kronbit.config import Config
from kronbit.kernels.polynomial import Polynomial, Product
from kronbit.linalg.roots import LEAST_RIDGE, converged_inverse_root, minimax_steps
from kronbit.step.preconditioner import Preconditioner


def with_spectrum(lam: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    V, _ = torch.linalg.qr(torch.randn(len(lam), len(lam), generator=generator).double())
    return (V * lam) @ V.mT


def exact(A: Tensor, p: int, damping: float) -> Tensor:
    lam, V = torch.linalg.eigh(A.double())
    damped = lam + damping * lam.amax(-1, keepdim=True)
    return (V * damped.unsqueeze(-2) ** (-1 / p)) @ V.mT


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(
    ("power", "damping", "tolerance"),
    # Beyond a condition of 1e5, rounding A to float32 dominates the error.
    [(0.0, 1e-6, 1e-5), (1.0, 1e-6, 1e-3), (2.0, 1e-4, 1e-3), (3.0, 1e-6, 2e-2), (6.0, 1e-2, 1e-4)],
)
def test_roots_match_the_eigenvalues(
    p: int, power: float, damping: float, tolerance: float, device: torch.device
) -> None:
    lam = torch.arange(1, 151).double() ** -power
    A = torch.stack([with_spectrum(scale * lam, seed) for seed, scale in enumerate((1.0, 1e-8))])
    A = A.float()
    actual = converged_inverse_root(A.clone().to(device), p, damping).cpu()
    for one, root in zip(A, actual, strict=True):
        assert relative_error(root, exact(one, p, damping)) < tolerance


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("p", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 4])
@pytest.mark.parametrize("n", [45, pytest.param(130, marks=slow)])
def test_kernels_compute_the_same_roots(n: int, p: int, kernels: torch.device) -> None:
    """Kernels compute one half of each symmetric product, with operands split in two parts."""
    lam = torch.arange(1, n + 1).double() ** -1.5
    A = torch.stack([with_spectrum(lam), with_spectrum(lam, 1) * 1e20, torch.zeros(n, n).double()])
    A = A.float()
    actual = converged_inverse_root(A.clone().to(kernels), p, 1e-6).cpu()
    for one, root in zip(A[:2], actual[:2], strict=True):
        assert relative_error(root, exact(one, p, 1e-6)) < 2e-3
        assert torch.equal(root, root.mT)
    assert torch.equal(actual[2], torch.eye(n))


@pytest.mark.parametrize("n", [60, 300])
def test_a_flat_spectrum_of_half_rank_at_the_default_damping(n: int, device: torch.device) -> None:
    """The largest eigenvalue is far below the norm, so the ridge is raised above rounding."""
    lam = torch.cat([torch.ones(n // 2), torch.zeros(n - n // 2)]).double()
    A = with_spectrum(lam).float()
    root = converged_inverse_root(A[None].clone().to(device), 4, 1e-6)[0].cpu()
    raised = max(1e-6, 1.5e-7 * float(A.norm()))
    assert (raised > 1e-6) == (n == 300)
    assert relative_error(root, exact(A, 4, raised)) < 0.05


def test_roots_are_correct_if_power_iteration_misses_the_largest_eigenvalue() -> None:
    """The iteration starts at the largest diagonal element, which may be in another block."""
    A = torch.zeros(200, 200)
    A[0, 0], A[1:, 1:] = 1.0, 0.9  # λ = 1 and 179
    actual = converged_inverse_root(A[None].clone(), 4, 1e-6)[0]
    assert relative_error(actual, exact(A, 4, 1.5e-7)) < 0.05


@pytest.mark.parametrize("p", [1, 2, 4])
def test_half_of_the_eigenvalues_may_be_zero(p: int) -> None:
    """The smallest eigenvalue is the ridge alone."""
    lam = torch.cat([torch.ones(100), torch.zeros(100)]).double()
    A = with_spectrum(lam).float()
    root = converged_inverse_root(A[None].clone(), p, 1e-4)[0]
    assert relative_error(root, exact(A, p, 1e-4)) < 2e-3


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_roots_scale_with_the_matrix(scale: float) -> None:
    A = with_spectrum(torch.arange(1, 41).double() ** -1).float()
    small = converged_inverse_root((A * scale)[None], 4, 1e-6)[0]
    assert relative_error(small, exact(A, 4, 1e-6) * scale**-0.25) < 1e-3


def test_roots_of_zero_scaled_identity_and_order_one() -> None:
    A = torch.zeros(2, 5, 5)
    A[1] = torch.eye(5) * 16
    actual = converged_inverse_root(A, 4, 0.0)
    assert torch.equal(actual[0], torch.eye(5))
    assert torch.allclose(actual[1], torch.eye(5) / 2, rtol=1e-5)
    for damping in (1e-6, 100.0, 1e18):
        one = converged_inverse_root(torch.full((1, 1, 1), 81.0), 4, damping)
        assert float(one) == pytest.approx((81 * (1 + damping)) ** -0.25, rel=5e-5)


def test_an_indefinite_matrix_is_not_reported_as_converged() -> None:
    A = with_spectrum(torch.linspace(-0.5, 1, 30).double()).float()
    good = with_spectrum(torch.linspace(0.5, 1, 30).double()).float()
    actual = converged_inverse_root(torch.stack([A, good]), 4, 1e-6)
    assert not torch.isfinite(actual[0]).any()
    assert relative_error(actual[1], exact(good, 4, 1e-6)) < 1e-5


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("least", [1e-9, LEAST_RIDGE, 1e-3, 0.5])
def test_steps_bring_the_whole_interval_to_one(p: int, least: float) -> None:
    r = torch.logspace(float(torch.tensor(least).log10()), 0, 2001).double() ** (1 / p)
    newton = r.clone()
    steps = minimax_steps(p, least)
    for a, b, c in steps:
        r = r * (a + b * r**p + c * r ** (2 * p))
        assert (r > 0).all()
        newton = newton * ((p + 1) - newton**p) / p
    assert (r - 1).abs().max() < 5e-5
    if least < 1e-6:  # Newton's steps are still far from 1
        assert (newton - 1).abs().max() > 0.5


def test_other_roots_are_refused() -> None:
    with pytest.raises(ValueError, match="p must be 1, 2 or 4; got 3"):
        converged_inverse_root(torch.eye(3)[None], 3, 1e-6)


def assert_batch_matches_separate_roots(
    orders: list[int], p: int, damping: float, device: torch.device
) -> None:
    """Check that batched and separate roots are bitwise equal. The last matrix is zero."""
    A = [with_spectrum(torch.arange(1, n + 1) ** -1.0, i).float() for i, n in enumerate(orders)]
    A[-1].zero_()
    padded = [functional.pad(a, (0, orders[0] - len(a), 0, orders[0] - len(a))) for a in A]
    sizes = torch.tensor(orders, dtype=torch.int32).to(device)
    actual = converged_inverse_root(torch.stack(padded).to(device), p, damping, sizes)
    for n, one, root in zip(orders, A, actual, strict=True):
        alone = converged_inverse_root(one[None].clone().to(device), p, damping)[0]
        assert torch.equal(root[:n, :n], alone)
        if bool(one.any()):
            assert relative_error(alone.cpu(), exact(one, p, damping)) < 2e-3
        else:
            assert torch.equal(alone.cpu(), torch.eye(n))


@slow
@pytest.mark.parametrize(
    ("p", "damping"),
    [(4, 1e-6), (2, 1.0), (1, 100.0)],
)
def test_roots_do_not_depend_on_the_batch(p: int, damping: float, kernels: torch.device) -> None:
    """Tiles of padding are skipped, and the padding of small matrices gets no ridge."""
    several_tiles = kernels.type == "cuda" or p == 4  # several interpreted tiles take long
    assert_batch_matches_separate_roots([140 if several_tiles else 60, 45, 12], p, damping, kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [1, 2, 4])
def test_tiles_of_many_matrices_run_concurrently(p: int) -> None:
    """Programs on a GPU run concurrently and wait for each other."""
    assert_batch_matches_separate_roots([600, 520, 300, 130, 45] * 9, p, 1e-4, torch.device("cuda"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@slow
def test_kernels_mark_roots_that_have_not_converged(kernels: torch.device) -> None:
    """Other matrices of the batch still get their roots."""
    good = with_spectrum(torch.arange(1, 41) ** -1.0).float()
    broken = [good.clone() for _ in range(3)]
    broken[0] -= 0.5 * torch.eye(40)
    broken[1][3, 5] = broken[1][5, 3] = torch.nan
    broken[2][7, 7] = torch.inf
    actual = converged_inverse_root(torch.stack([good, *broken]).to(kernels), 4, 1e-6).cpu()
    assert relative_error(actual[0], exact(good, 4, 1e-6)) < 1e-3
    assert actual[1:].isnan().flatten(1).any(1).all()


@pytest.mark.parametrize(
    "scale", [1e-37, pytest.param(1e-34, marks=slow), pytest.param(1e34, marks=slow)]
)
def test_kernels_compute_roots_of_any_scale(scale: float, kernels: torch.device) -> None:
    A = with_spectrum(torch.arange(1, 41) ** -1.0)
    actual = converged_inverse_root((A * scale).float()[None].to(kernels), 4, 1e-6)[0].cpu()
    assert relative_error(actual.double() * scale**0.25, exact(A, 4, 1e-6)) < 1e-3


@given(
    st.lists(st.tuples(*[st.integers(0, 2**30)] * 4), min_size=2, max_size=12),
    st.integers(0, 2**30),
)
def test_no_line_of_a_polynomial_overwrites_a_later_operand(
    choices: list[tuple[int, int, int, int]], which: int
) -> None:
    pytest.importorskip("triton")
    from kronbit.kernels.evaluation import _places

    lines = []
    for number, (a, b, c, adds) in enumerate(choices):
        known = number + 1
        lines.append(Product(a % known, b % known, c % known if adds % 2 else None))
    checked = which % (len(lines) - 1)
    lines[checked] = lines[checked]._replace(C=which % (checked + 1))
    polynomial = Polynomial(tuple(lines), checked + 1, 0.1)
    places = _places(polynomial)
    line_at = {0: 0}  # line number by place
    for number, (line, place) in enumerate(zip(lines, places, strict=True), 1):
        out, *operands = place
        assert out not in operands
        assert [line_at.get(place) for place in operands] == [line.A, line.B, line.C]
        line_at[out] = number
    last = max(map(max, places))
    assert places[-1][0] == last > 0
    assert line_at[places[checked][3]] == lines[checked].C


def test_batches_of_roots_are_few_and_full() -> None:
    """Every row occurs once, no batch exceeds the workspace, and none is nearly empty."""
    config = Config(max_order=1200)
    shapes = [(70, 128), (300, 280), (90, 1100), (1030, 130)] * 7
    members = [Member(route(shape, config), config) for shape in shapes]
    preconditioner = Preconditioner(members, Shampoo.algorithm, 2**26, False, torch.device("cpu"))
    due = {i: Due(config) for i in range(len(members))}
    rows, sizes = [], []
    for batch in batches(
        due_parts(preconditioner.stacks.groups, due),
        2**26,
        lambda _: CONVERGED_ROOT,
        lambda _: True,
    ):
        orders = [part.factors.order for part in batch]
        assert orders == sorted(orders, reverse=True)
        assert len({math.ceil(n / 1024) for n in orders}) == 1
        count = sum(part.rows.stop - part.rows.start for part in batch)
        sizes.append((orders[0], count))
        assert count <= CONVERGED_ROOT.rows(orders[0], (0, 0), 2**26)
        rows += [
            (id(part.group), part.right, row)
            for part in batch
            for row in range(part.rows.start, part.rows.stop)
        ]
    assert len(set(rows)) == len(rows) == 2 * len(shapes)
    large = [count for order, count in sizes if order > 1024]
    assert sum(large) == 14
    assert len(large) == math.ceil(14 / CONVERGED_ROOT.rows(1100, (0, 0), 2**26))
    assert max(large) - min(large) <= 1
    small = len(sizes) - len(large)
    assert small == math.ceil(42 / CONVERGED_ROOT.rows(300, (0, 0), 2**26))
