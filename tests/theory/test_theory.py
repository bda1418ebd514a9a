"""The paper's lemmas and proposition on quantised preconditioners, tested on float64 matrices.

Lemma 1 is also tested on eigenvectors that kronbit quantises and rectifies.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.quantised_eigenvectors import alpha_beta, cosine, nre, power, restored, sharp
from torch import Tensor

from kronbit.config import Config
from kronbit.factors import Batch, Factors
from kronbit.lab.quantization.errors import Statistic, restored_vectors, synthetic_matrix
from kronbit.quantization import Quantizer

ROUNDING = 1e-6  # relative rounding error of float64 powers of matrices
seeds = st.integers(0, 2**32 - 1)


def orthogonal(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]


# --------------------------------------------------------------------------------------- Lemma 1


@st.composite
def rotated_matrices(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draw U, an orthogonal V, λ over six orders of magnitude, and s."""
    n = draw(st.integers(2, 10))
    exponents = draw(st.lists(st.floats(-3, 3), min_size=n, max_size=n))
    U, noise = orthogonal(n, draw(seeds)), orthogonal(n, draw(seeds))
    rotation = torch.linalg.matrix_exp(draw(st.floats(1e-3, 3.0)) * (noise - noise.mT))
    return (
        U,
        U @ rotation,
        10 ** torch.tensor(exponents, dtype=torch.float64),
        draw(st.floats(-2, 2)),
    )


@settings(deadline=None)
@given(rotated_matrices())
def test_lemma_1_holds_for_every_spectrum_and_power(
    case: tuple[Tensor, Tensor, Tensor, float],
) -> None:
    U, V, lam, s = case
    B, B_1 = power((U * lam) @ U.mT, s), power((V * lam) @ V.mT, s)
    alpha, beta = alpha_beta(V, U)
    assert nre(B_1, B) <= 2 * alpha + ROUNDING
    assume(beta <= 1)  # (2) requires 1 - β ≥ 0
    assert cosine(B, B_1) >= (1 - beta) ** 2 - ROUNDING
    assert beta == pytest.approx(alpha**2 / 2, abs=ROUNDING)
    assert nre(B_1, B) <= sharp(alpha) + ROUNDING


@pytest.mark.parametrize("angle", [0.01, 0.1, 0.5])
def test_lemma_1_is_tight_up_to_a_factor(angle: float) -> None:
    """If one eigenvalue dominates, bound (2) is attained, and bound (1) up to a factor of √2."""
    c, s = math.cos(angle), math.sin(angle)
    V = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    lam = torch.tensor([1.0, 1e-13]).double()
    B, B_1 = torch.diag(lam), (V * lam) @ V.mT
    alpha, beta = alpha_beta(V, torch.eye(2).double())
    assert cosine(B, B_1) == pytest.approx((1 - beta) ** 2, rel=1e-12)
    assert nre(B_1, B) == pytest.approx(sharp(alpha), rel=1e-9)
    assert nre(B_1, B) < 2 * alpha / math.sqrt(2)


def test_the_sharp_bound_is_for_small_alpha() -> None:
    """Vectors of opposite sign give the same matrix, although 1 - β is negative."""
    U, lam = torch.eye(3).double(), torch.tensor([1.0, 2.0, 5.0]).double()
    V = torch.stack([-U[0], U[2], U[1]], 1)
    alpha, beta = alpha_beta(V, U)
    assert alpha > math.sqrt(2)
    assert beta > 1
    assert sharp(alpha) < nre((V * lam) @ V.mT, torch.diag(lam)) < 2 * alpha


def test_errors_depend_on_the_spectrum_though_the_bounds_do_not() -> None:
    """The paper calls errors independent of Λ and s. Its lemma proves this only for the bounds."""
    statistic = synthetic_matrix(64)
    V = restored_vectors(statistic, Quantizer(), 4)
    errors = []
    for spread in (1.0, 10.0, 1000.0):
        lam = torch.where(statistic.lam > 1, spread, 1.0)
        A, A_1 = ((X * lam) @ X.mT for X in (statistic.U, V))
        errors.append(nre(power(A_1, -0.25), power(A, -0.25)))
    assert errors[0] < 1e-6
    assert errors[0] < errors[1] < errors[2]


POWERS = (-8.0, -1.0, -0.5, -0.25, 0.5, 1.0)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("mapping", ["linear2", "dt"])
def test_lemma_1_on_quantised_eigenvectors(mapping: str, bits: int) -> None:
    statistic, quantizer = synthetic_matrix(256), Quantizer(bits, mapping)
    plain, once, full = (restored(statistic, quantizer, k, POWERS) for k in (0, 1, 4))
    # After four steps V is orthogonal, and the lemma holds at every power.
    assert full.orthogonal
    for error, cos in full.errors.values():
        assert error <= sharp(full.alpha) < full.nre_bound
        assert cos >= full.cosine_bound
    assert full.beta == pytest.approx(full.alpha**2 / 2, abs=1e-5)
    # The lemma does not apply if V is not orthogonal, as powers change its lengths and angles too.
    for result in (plain, once):
        assert not result.orthogonal
        assert result.errors[-0.25][0] < result.nre_bound
        assert result.errors[-0.25][1] > result.cosine_bound
        assert result.errors[-8.0][0] > result.nre_bound
    # One step suffices for (2) but not for (1): β is large because columns are too short.
    assert once.errors[-8.0][1] > once.cosine_bound
    # The first step nearly completes α but not β: columns remain too short.
    assert full.alpha < once.alpha < 0.8 * plain.alpha
    assert once.alpha < 1.1 * full.alpha
    assert once.beta > 3 * full.beta
    assert once.length < 0.99 < 1 - 1e-5 < full.length


def test_alpha_and_beta_of_the_paper_match_rectified_linear2() -> None:
    """At 4 bits, α < 0.1 and β < 0.005 hold after four steps."""
    statistic = synthetic_matrix(256)
    results = {
        (mapping, steps): restored(statistic, Quantizer(4, mapping), steps, ())
        for mapping, steps in (("linear2", 0), ("linear2", 1), ("linear2", 4), ("dt", 4))
    }
    assert results["linear2", 4].alpha < 0.1
    assert results["linear2", 4].beta < 0.005
    assert results["linear2", 0].alpha > 0.1
    assert results["linear2", 1].beta > 0.005
    assert results["dt", 4].alpha > 0.1


def test_an_update_loses_trace_unless_fully_rectified() -> None:
    """Björck's map σ ↦ (3 σ - σ³) / 2 is at most 1, so columns are too short after one step."""
    statistic, rows = synthetic_matrix(128), slice(0, 1)
    A = (statistic.U * statistic.lam) @ statistic.U.mT
    shares = {}
    for steps in (1, 4):
        config = Config(method="eigen", beta=1.0, start=0.0, update_rectify=steps)
        factors = Factors(128, 1, config.format(128), 0.0, "cpu")
        for name, leaf in factors.method.encode_matrix(A.float().unsqueeze(0)).items():
            factors.tensors[name].copy_(leaf)
        lam = factors.tensors["eigenvalues"]
        before = float(lam.sum())
        zeros, all_rows = torch.zeros(1, 128, 128), torch.ones(1, dtype=torch.bool)
        _, replaced = Batch([(factors, rows)]).update(zeros, all_rows, config)
        assert bool(replaced)
        shares[steps] = float(lam.sum()) / before
    assert 0.98 < shares[1] < 0.99
    assert shares[4] == pytest.approx(1, abs=1e-4)


# --------------------------------------------------------------------------------------- Lemma 2


def h_1(s: float, ell: float, c: float, k: float) -> float:
    return math.sqrt(ell) * abs(k**s - 1) / math.sqrt(c ** (2 * s) + ell)


def h_2(ell: float, c: float, t: float, s: float) -> float:
    return (ell * t**s + c**s) / math.sqrt((1 + ell * t ** (2 * s)) * (ell + c ** (2 * s)))


def two_valued(m: int, n: int, c: float, small: float, lam: float = 1.0) -> Tensor:
    """Return m eigenvalues c λ, then n eigenvalues small λ."""
    return lam * torch.tensor([c] * m + [small] * n, dtype=torch.float64)


ratios = st.floats(1.0, 1e4)
factors = st.floats(-3, 3).map(lambda x: 10**x)
exponents = st.floats(-2, 2)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), ratios, factors, factors, exponents, seeds)
def test_lemma_2_closed_forms(
    m: int, n: int, c: float, k: float, lam: float, s: float, seed: int
) -> None:
    U, ell, t = orthogonal(m + n, seed), n / m, k / c
    B = power((U * two_valued(m, n, c, 1.0, lam)) @ U.mT, s)
    B_2 = power((U * two_valued(m, n, c, k, lam)) @ U.mT, s)
    assert nre(B_2, B) == pytest.approx(h_1(s, ell, c, k), rel=1e-6, abs=1e-6)
    assert cosine(B, B_2) == pytest.approx(h_2(ell, c, t, s), rel=1e-6)


@given(ratios, factors, factors, st.lists(st.floats(-3, -1e-3), min_size=2, max_size=2))
def test_lemma_2_first_error_falls_with_s(
    c: float, k: float, ell: float, pair: list[float]
) -> None:
    lower, higher = sorted(pair)
    assert h_1(lower, ell, c, k) >= h_1(higher, ell, c, k) * (1 - 1e-12)


def test_lemma_2_needs_c_at_least_one() -> None:
    """The proof states c ≥ 0 but uses ln c ≥ 0: for c < 1, the error rises with s."""
    assert h_1(-2.0, 1.0, 0.1, 1.5) < h_1(-0.5, 1.0, 0.1, 1.5)


@given(ratios, factors, st.floats(-3, 3), st.lists(factors, min_size=2, max_size=2))
def test_lemma_2_first_error_rises_with_l(c: float, k: float, s: float, pair: list[float]) -> None:
    fewer, more = sorted(pair)
    assert h_1(s, fewer, c, k) <= h_1(s, more, c, k) * (1 + 1e-12)


@given(ratios, factors, exponents, st.lists(factors, min_size=2, max_size=2), st.booleans())
def test_lemma_2_cosine_is_least_at_its_turning_point(
    c: float, k: float, s: float, pair: list[float], left: bool
) -> None:
    t = k / c
    turning = (c / t) ** s
    # Two points on the same side of the turning point.
    near, far = sorted(x if x >= 1 else 1 / x for x in pair)
    near, far = (turning / near, turning / far) if left else (turning * near, turning * far)
    assert h_2(turning, c, t, s) <= h_2(near, c, t, s) * (1 + 1e-9)
    assert h_2(near, c, t, s) <= h_2(far, c, t, s) * (1 + 1e-9)
    # (3): at the turning point, both errors depend on k^s alone.
    x = k**s
    assert h_1(s, turning, c, k) == pytest.approx(abs(x - 1) / math.sqrt(x + 1), rel=1e-9)
    assert h_2(turning, c, t, s) == pytest.approx(2 / math.sqrt(2 + x + 1 / x), rel=1e-9)


@given(ratios, st.floats(0, 3).map(lambda x: 10**x), factors, st.floats(-2, -1e-3))
def test_lemma_2_remarks_hold(c: float, k: float, ell: float, s: float) -> None:
    t = k / c
    assert h_1(1.0, ell, c, k) <= t * math.sqrt(ell)
    share = ell * t ** (2 * s)
    assert h_2(ell, c, t, s) >= math.sqrt(share / (1 + share)) * (1 - 1e-12)


# --------------------------------------------------------------------------------- Proposition 1

T_OF_4_BITS = 0.02


@given(st.floats(3, 9).map(lambda x: 10**x), st.floats(-4, -0.25))
def test_proposition_1_where_small_eigenvalues_are_perturbed(c: float, s: float) -> None:
    x = (T_OF_4_BITS * c) ** s
    assert x <= 20**-0.25 * (1 + 1e-12)
    assert abs(x - 1) / math.sqrt(x + 1) >= 0.4
    assert 1 - 2 / math.sqrt(2 + x + 1 / x) >= 0.06


@pytest.mark.parametrize(("s", "per_small", "n"), [(-0.25, 15, 1), (-0.25, 20, 4), (-0.5, 224, 1)])
def test_proposition_1_on_matrices(s: float, per_small: int, n: int) -> None:
    """The proposition holds for quantised eigenvectors with measured α and β.

    l = (c / t)^s = n / m must be a ratio of integers; it determines c, which is at least 1000.
    """
    m = per_small * n
    c = T_OF_4_BITS * per_small ** (-1 / s)
    assert c >= 1000
    statistic = Statistic(two_valued(m, n, c, 1.0), orthogonal(m + n, 0), Config())
    U, lam = statistic.U, statistic.lam
    V = restored_vectors(statistic, Quantizer(), 4)
    alpha, beta = alpha_beta(V, U)
    assert alpha <= 0.1
    assert beta <= 0.005
    B, B_1 = power((U * lam) @ U.mT, s), power((V * lam) @ V.mT, s)
    B_2 = power((U * two_valued(m, n, c, T_OF_4_BITS * c)) @ U.mT, s)
    assert 2 * nre(B_1, B) <= 0.4 <= nre(B_2, B)
    assert 6 * (1 - cosine(B, B_1)) <= 0.06 <= 1 - cosine(B, B_2)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([(-0.25, 15), (-0.5, 224)]), seeds)
def test_proposition_1_at_its_limit(case: tuple[float, int], seed: int) -> None:
    """The proposition holds for any rotation that moves one column by 0.1 and none farther."""
    s, m = case
    c = T_OF_4_BITS * m ** (-1 / s)
    U, noise, lam = torch.eye(m + 1).double(), orthogonal(m + 1, seed), two_valued(m, 1, c, 1.0)
    generator = noise - noise.mT
    low, high = 0.0, 1.0  # for some angle in between, the farthest column moves by 0.1
    for _ in range(50):
        angle = (low + high) / 2
        V = torch.linalg.matrix_exp(angle * generator)
        low, high = (angle, high) if alpha_beta(V, U)[0] < 0.1 else (low, angle)
    alpha, beta = alpha_beta(V, U)
    assert alpha == pytest.approx(0.1, rel=1e-9)
    assert beta == pytest.approx(0.005, rel=1e-6)  # ⟨u, Δu⟩ ≥ -0.005 follows
    B, B_1 = power(torch.diag(lam), s), power((V * lam) @ V.mT, s)
    B_2 = power(torch.diag(two_valued(m, 1, c, T_OF_4_BITS * c)), s)
    assert 2 * nre(B_1, B) <= 0.4 <= nre(B_2, B)
    assert 6 * (1 - cosine(B, B_1)) <= 0.06 <= 1 - cosine(B, B_2)


def test_proposition_1_needs_a_large_condition() -> None:
    x = (T_OF_4_BITS * 500) ** -0.25
    assert abs(x - 1) / math.sqrt(x + 1) < 0.4
