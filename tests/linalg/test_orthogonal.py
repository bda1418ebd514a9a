"""Orthogonalisation, power iteration and Newton's roots match float64 and the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import oracle
from support.numerics import no_host_sync, orthogonal, relative_error, spd
from torch import Tensor

from kronbit.linalg.orthogonal import (
    QR,
    bjorck,
    cholesky_qr,
    householder_qr,
    orthogonality_error,
    shifted_cholesky_qr,
    subspace_iteration,
)
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import operand
from kronbit.linalg.roots import inverse_root, power_iteration
from kronbit.quantization import Quantizer

ORDERS = pytest.mark.parametrize("n", [1, 5, 64, 97])


def quantised(U: Tensor, bits: int = 4) -> Tensor:
    quantizer = Quantizer(bits)
    return quantizer.dequantize(quantizer.quantize(U.float()), U.shape[-1])


@ORDERS
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_bjorck_matches_the_formula(n: int, steps: int, device: torch.device) -> None:
    V = quantised(orthogonal(3, n, n))
    expected = torch.stack([oracle.bjorck(v.double(), steps) for v in V])
    assert relative_error(bjorck(V.to(device), steps), expected) < 1e-6


def test_bjorck_repairs_quantised_eigenvectors() -> None:
    V = quantised(orthogonal(2, 128, 128))
    errors = [float(orthogonality_error(bjorck(V, t)).max()) for t in range(5)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.02
    assert errors[4] < 1e-5


QRS = pytest.mark.parametrize(
    "qr",
    [
        cholesky_qr,
        shifted_cholesky_qr,
        householder_qr,
    ],
)


@QRS
@ORDERS
@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_qr_matches_householder(qr: QR, n: int, condition: float, device: torch.device) -> None:
    """The reference is Householder QR in float64, with a non-negative diagonal of R."""
    X = spd(4, n, condition) @ orthogonal(4, n, n)
    Q, good = qr(X.float().to(device))
    expected = torch.stack([oracle.qr(x) for x in X])
    assert (Q.cpu() - expected).abs().max() < 1e-4
    assert orthogonality_error(Q).max() < 1e-5
    assert good.all()


@QRS
def test_qr_takes_tall_matrices(qr: QR, device: torch.device) -> None:
    X = torch.randn(2, 50, 20)
    Q, good = qr(X.clone().to(device))
    assert (Q.cpu() - torch.stack([oracle.qr(x.double()) for x in X])).abs().max() < 1e-5
    assert good.all()


@pytest.mark.parametrize("kind", ["ill-conditioned", "rank one", "zero", "zero column", "nan"])
def test_cholesky_qr_reports_failures(kind: str, device: torch.device) -> None:
    """One bad matrix fails and does not affect the others. Householder handles it."""
    n = 40
    well_conditioned = spd(1, n, 10.0)[0]
    bad = {
        "ill-conditioned": spd(1, n, 1e9)[0] @ orthogonal(n, n),
        "rank one": torch.ones(n, n).double(),
        "zero": torch.zeros(n, n).double(),
        "zero column": well_conditioned * (torch.arange(n) > 0),
        "nan": torch.where(torch.eye(n) > 0, torch.nan, well_conditioned),
    }[kind]
    X = torch.stack([well_conditioned, bad, well_conditioned]).float().to(device)
    Q, good = cholesky_qr(X.clone())
    assert good.tolist() == [True, False, True]
    alone, _ = cholesky_qr(X[:1].clone())
    assert (Q[0] - alone[0]).abs().max() < 1e-6
    assert (Q[2] - alone[0]).abs().max() < 1e-6
    if kind != "nan":
        assert orthogonality_error(householder_qr(X)[0]).max() < 1e-5


@pytest.mark.parametrize(
    ("condition", "qr"),
    [
        (1e4, cholesky_qr),
        (1e5, cholesky_qr),
        (1e8, shifted_cholesky_qr),
        (1e10, shifted_cholesky_qr),
    ],
)
def test_cholesky_qr_takes_nearly_singular_matrices(
    condition: float, qr: QR, device: torch.device
) -> None:
    """Q is orthonormal, and R = Qᵀ X is triangular up to float32's rounding."""
    n = 200
    X = (spd(2, n, condition) @ orthogonal(n, n)).float()
    X /= X.norm(dim=-2, keepdim=True)
    Q, good = qr(X.clone().to(device))
    assert good.all()
    assert orthogonality_error(Q).max() < 1e-5
    R = Q.cpu().double().mT @ X.double()
    assert R.tril(-1).abs().max() < 2e-6
    assert R.diagonal(dim1=-2, dim2=-1).min() > -1e-6


def test_a_second_pass_does_not_change_other_matrices(device: torch.device) -> None:
    n = 120
    easy, hard = orthogonal(n, n), spd(1, n, 1e5)[0] @ orthogonal(n, n)
    X = torch.stack([easy, hard, easy, hard]).float().to(device)
    Q, good = cholesky_qr(X.clone())
    assert good.all()
    for row in range(4):
        alone, _ = cholesky_qr(X[row : row + 1].clone())
        assert (Q[row] - alone[0]).abs().max() < (1e-6 if row % 2 == 0 else 1e-3)


@QRS
def test_subspace_iteration_finds_eigenvectors(qr: QR, device: torch.device) -> None:
    A = spd(2, 20, 1e3)
    single = A.float().to(device)
    P, good = subspace_iteration(operand(single), single.clone(), 60, qr)  # from V = I
    rotated = P.cpu().double().mT @ A @ P.cpu().double()
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert relative_error(off + A, A) < 1e-4
    one, _ = subspace_iteration(operand(single), single.clone(), 1, qr)
    assert (one.cpu() - torch.stack([oracle.qr(a) for a in A])).abs().max() < 1e-4
    assert good.all()


@ORDERS
def test_power_iteration_matches_the_oracle_and_bounds_the_largest_eigenvalue(
    n: int, device: torch.device
) -> None:
    A = spd(3, n, 1e4)
    actual = power_iteration(A.float().to(device)).cpu()
    expected = torch.stack([oracle.power_iteration(a) for a in A])
    assert torch.allclose(actual.double(), expected, rtol=1e-4)
    assert (actual <= 1 + 1e-5).all()
    assert (actual >= 0.8).all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_power_iteration_converges_with_more_steps(scale: float) -> None:
    A = (spd(1, 10, 10.0) * scale).float()
    assert torch.allclose(power_iteration(A, steps=200), torch.tensor([scale]), rtol=1e-3, atol=0)


@ORDERS
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 10, 40])
def test_inverse_root_is_the_coupled_newton_iteration(
    n: int, p: int, steps: int, device: torch.device
) -> None:
    A = spd(3, n, 1e2)
    actual = inverse_root(A.float().to(device), p, 1e-3, steps)
    expected = torch.stack([oracle.schur_newton(a, p, 1e-3, steps) for a in A])
    assert relative_error(actual, expected) < 1e-4


@pytest.mark.parametrize("p", [1, 2, 4])
def test_inverse_root_converges_to_the_eigendecomposition(p: int, device: torch.device) -> None:
    A = spd(3, 60, 1e4)
    ridge = torch.stack([oracle.power_iteration(a) for a in A]) * 1e-5
    lam, U = torch.linalg.eigh(A)
    expected = (U * (lam + ridge[:, None]).pow(-1 / p)[:, None, :]) @ U.mT
    actual = inverse_root(A.float().to(device), p, 1e-5, 60)
    assert relative_error(actual, expected) < 5e-3


def test_ten_newton_steps_do_not_converge_at_high_condition() -> None:
    """This is why `newton_steps` is an option and the docs describe an effective damping."""
    A = spd(1, 60, 1e6)
    lam, U = torch.linalg.eigh(A)
    expected = (U * (lam + 1e-6).pow(-0.25)[:, None, :]) @ U.mT
    ten, forty = (inverse_root(A.float(), 4, 1e-6, steps) for steps in (10, 40))
    assert relative_error(ten, expected) > 0.2
    assert relative_error(forty, expected) < 0.02


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    ["zero", "rank one", "rank half", "order 1", "condition 1e12", "huge", "tiny", "indefinite"],
)
def test_inverse_root_stays_finite(name: str, p: int, device: torch.device) -> None:
    n = 64
    A = {
        "zero": torch.zeros(1, n, n),
        "rank one": torch.ones(1, n, n),
        "rank half": orthogonal(1, n, n)[..., : n // 2] @ orthogonal(1, n, n)[..., : n // 2].mT,
        "order 1": torch.full((1, 1, 1), 3.0),
        "condition 1e12": spd(1, n, 1e12),
        "huge": spd(1, n, 1e3) * 1e30,
        "tiny": spd(1, n, 1e3) * 1e-30,
        "indefinite": spd(1, n, 1e3) - 1e-2 * torch.eye(n),
    }[name]
    A = (A @ A.mT if name == "rank half" else A).float().to(device)
    before = A.clone()
    for damping in (0.0, 1e-6):
        root = inverse_root(A, p, damping, 10)
        assert torch.isfinite(root).all()
        assert torch.equal(A, before), "the input was changed"
    if name == "zero":
        assert torch.equal(root, torch.eye(n, device=device)[None])


def test_inverse_root_freezes_each_matrix_separately() -> None:
    A = torch.cat([spd(1, 30, 10.0), spd(1, 30, 1e5), torch.zeros(1, 30, 30)]).float()
    A = torch.cat([A, torch.full((1, 30, 30), torch.nan)])
    together = inverse_root(A, 4, 1e-6, 15)
    for i in range(3):
        assert relative_error(together[i], inverse_root(A[i : i + 1], 4, 1e-6, 15)[0]) < 1e-5
    assert torch.isnan(together[3]).all()


def test_inverse_root_refuses_other_roots() -> None:
    with pytest.raises(ValueError, match="p must be 1, 2 or 4; got 3"):
        inverse_root(torch.eye(3)[None], 3, 0.0, 10)


@pytest.mark.gpu
def test_linear_algebra_does_not_synchronise() -> None:
    A = spd(3, 64, 1e3).float().cuda()
    V = orthogonal(3, 64, 64).float().cuda()
    inverse_root(A, 4, 1e-6, 10)
    cholesky_qr(A.clone())
    with no_host_sync():
        cholesky_qr(A.clone())
        inverse_root(A, 4, 1e-6, 10)
        power_iteration(A)
        bjorck(V, 4)


def precisions() -> tuple[str, ...]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def inherit_precision() -> None:
    torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(params=["legacy high", "legacy medium", "cuda tf32", "all tf32"])
def _reduced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Enter settings that allow less than float32 precision."""
    inherit_precision()  # a leftover setting of one backend would hide the global one
    if request.param.startswith("legacy"):
        torch.set_float32_matmul_precision(request.param.split()[1])
    elif request.param == "cuda tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.backends.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")
    inherit_precision()


@pytest.mark.usefixtures("_reduced")
def test_precision_is_full_inside_and_restored_after(device: torch.device) -> None:
    before = precisions()
    assert {"tf32", "bf16"} & set(before)
    A = spd(2, 96, 1e3)
    # 1e-6 is out of reach for TF32 (3e-4) and bf16 (3e-3)
    V = orthogonal(2, 96, 96)
    assert relative_error(bjorck(V.float().to(device), 1), oracle_bjorck(V)) < 1e-6
    root = inverse_root(A.float().to(device), 4, 0.0, 40)
    lam, U = torch.linalg.eigh(A)
    assert relative_error(root, (U * lam.pow(-0.25)[:, None, :]) @ U.mT) < 1e-4
    assert precisions() == before
    with full_precision():
        assert not {"tf32", "bf16"} & set(precisions())
    assert precisions() == before
    with pytest.raises(ZeroDivisionError), full_precision():
        _ = 1 / 0
    assert precisions() == before


def test_an_inherited_precision_stays_inherited() -> None:
    inherit_precision()
    try:
        torch.backends.fp32_precision = "tf32"
        with full_precision():
            assert precisions() == ("ieee", "ieee")
        assert precisions() == ("tf32", "tf32")
        torch.backends.fp32_precision = "ieee"
        assert precisions() == ("ieee", "ieee")
    finally:
        inherit_precision()


def oracle_bjorck(V: Tensor) -> Tensor:
    return torch.stack([oracle.bjorck(v, 1) for v in V])


def test_autocast_does_not_reach_factor_math(device: torch.device) -> None:
    V = orthogonal(2, 96, 96)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        actual = bjorck(V.float().to(device), 1)
        assert torch.is_autocast_enabled(device.type)
    assert actual.dtype == torch.float32
    assert relative_error(actual, oracle_bjorck(V)) < 1e-6
