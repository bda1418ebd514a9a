"""Kernels match the torch reference, interpreted on the CPU and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.numerics import relative_error, slow
from torch import Tensor, nn
from torch.nn import functional

from kronbit import Shampoo
from kronbit.linalg.backend import backend, padded_by_identity
from kronbit.linalg.orthogonal import orthogonality_error, shifted_cholesky_qr
from kronbit.linalg.products import multiply, operand
from kronbit.linalg.roots import power_iteration
from kronbit.quantization import Quantizer

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.bf16_products,
]

QUANTISERS = [
    (4, "linear2", 64, 67),
    (3, "dt", 16, 5),
    pytest.param(4, "linear2", 48, 100, marks=slow),
    pytest.param(4, "dt", 64, 65, marks=slow),
    (8, "linear2", 64, 70),
    pytest.param(6, "linear", 16, 33, marks=slow),
    pytest.param(3, "linear2", 64, 67, marks=slow),
]


@pytest.mark.parametrize(("bits", "mapping", "block_size", "n"), QUANTISERS)
def test_codes_and_values_are_bitwise_equal(
    bits: int, mapping: str, block_size: int, n: int, kernels: torch.device
) -> None:
    from kronbit.kernels import quantization as quantiser

    X = torch.randn(2, n, n)
    X[0, 0] = 0
    X[1, 0, 0] = 1e-40
    reference = Quantizer(bits, mapping, block_size)
    code_format = reference.code_format
    for stack in (X, X.mT):
        expected = reference.encode(stack)
        actual = quantiser.encode(stack.to(kernels), False, code_format)
        assert torch.equal(actual[0].cpu(), expected.codes)
        assert torch.equal(actual[1].cpu(), expected.scales)
        back = quantiser.decode(actual[0], actual[1], None, code_format)
        assert torch.equal(back.cpu(), reference.decode(expected, n))
        larger = n + 70
        stacks = [(actual[0][:1], actual[1][:1]), actual[:2]]
        parts = quantiser.decode_operand(stacks, larger, code_format)
        whole = padded_by_identity(back, larger)
        assert relative_error(parts.float()[1:], whole) < 2**-21
        side = parts.hi.shape[-1]
        assert torch.equal(parts.float()[0], parts.float()[1])
        assert not parts.hi[1:, larger:].any()
        assert not parts.hi[1:, :, larger:side].any()
    exact_diagonal = X.diagonal(dim1=-2, dim2=-1).clone()
    codes, scales, diagonal = quantiser.encode(X.to(kernels), True, code_format)
    assert torch.equal(diagonal.cpu(), exact_diagonal)
    X.diagonal(dim1=-2, dim2=-1).zero_()
    whole = reference.decode(reference.encode(X), n)
    whole.diagonal(dim1=-2, dim2=-1).copy_(exact_diagonal)
    back = quantiser.decode(codes, scales, diagonal, code_format)
    assert torch.equal(back.cpu(), whole)


def test_a_nan_makes_a_scale_that_is_refused(kernels: torch.device) -> None:
    from kronbit.kernels import quantization as quantiser

    X = torch.ones(1, 20, 20, device=kernels)
    X[0, 3, 3] = torch.nan
    _, scales, _ = quantiser.encode(X, False, Quantizer(4).code_format)
    assert (~torch.isfinite(scales)).sum() == 1


@pytest.mark.parametrize("sizes", [(70, 50, 33), (5, 7, 3), (64, 128, 130)])
def test_products_are_as_accurate_as_float32(
    sizes: tuple[int, int, int], kernels: torch.device
) -> None:
    m, depth, n = sizes
    A, B = torch.randn(2, m, depth) * 1e-3, torch.randn(2, depth, n) * 1e5
    exact = A.double() @ B.double()
    a, b = operand(A.to(kernels)), operand(B.to(kernels))
    assert relative_error(multiply(a, b), exact) < 5e-7
    assert relative_error(multiply(b.mT, a.mT), exact.mT) < 5e-7
    C = torch.randn(2, m, n)
    out = C.clone().to(kernels)
    result = multiply(a, b, C=out, alpha=-0.5, beta=1.5, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out, 1.5 * C.double() - 0.5 * exact) < 5e-7
    gram = multiply(a, a.mT, symmetric=True)
    assert relative_error(gram, A.double() @ A.double().mT) < 5e-7


def test_products_of_zero_tiny_huge_and_broken_matrices(kernels: torch.device) -> None:
    X = torch.stack([torch.zeros(9, 9), torch.full((9, 9), 1e-25), torch.full((9, 9), 1e18)])
    x = operand(X.to(kernels))
    eye = operand(torch.eye(9, device=kernels).repeat(3, 1, 1), bound=1.0)
    assert relative_error(multiply(x, eye)[1:], X[1:]) < 1e-6
    assert torch.equal(multiply(x, eye)[0].cpu(), X[0])
    X[0, 0, 0] = torch.nan
    assert not torch.isfinite(multiply(operand(X.to(kernels)), eye)[0]).all()
    assert torch.isfinite(multiply(operand(X.to(kernels)), eye)[1]).all()


@pytest.mark.parametrize("n", [5, 64, 130])
def test_chained_products_are_as_accurate_as_float32(n: int, kernels: torch.device) -> None:
    A = torch.randn(2, n, n, dtype=torch.float64).float() / n**0.5
    M = A @ A.mT * 1e6
    a, exact = operand(A.to(kernels)), A.double() @ A.double().mT
    compose = backend(a).compose
    S = compose(a, a.mT, symmetric=True)
    assert relative_error(S.float(), exact) < 1e-6
    assert relative_error(multiply(S, a), exact @ A.double()) < 1e-6
    assert relative_error(compose(a.mT, a).float(), A.double().mT @ A.double()) < 1e-6
    step = compose(S, a, C=a, alpha=-0.5, beta=1.5)
    assert relative_error(step.float(), 1.5 * A.double() - 0.5 * exact @ A.double()) < 1e-6
    bound = M.diagonal(dim1=-2, dim2=-1).amax(-1).to(kernels)
    large = compose(a, a.mT, C=M.to(kernels), alpha=0.1, beta=0.9, symmetric=True, bound=bound)
    assert relative_error(large.float(), 0.1 * exact + 0.9 * M.double()) < 1e-6
    lam = torch.rand(2, n) * 1e7
    scaled = backend(a).scale_rows(a, lam.to(kernels), lam.amax(-1).to(kernels))
    assert relative_error(scaled.float(), A.double() * lam.double().unsqueeze(-1)) < 1e-6


def test_columns_are_normalised(kernels: torch.device) -> None:
    X = torch.randn(2, 70, 67) * 10.0 ** torch.randint(-12, 12, (67,))
    X[0, :, 3] = 0.0
    exact = X.double() / X.double().norm(dim=-2, keepdim=True).clamp(min=1e-300)
    assert relative_error(backend(kernels).normalise_columns(X.to(kernels)).float(), exact) < 1e-6
    Y = torch.randn(2, 70, 67)
    dots = (exact.float().double() * Y.double()).sum(-2)
    actual = backend(kernels).column_dots(exact.float().to(kernels), Y.to(kernels))
    assert relative_error(actual, dots) < 1e-6


def test_skipping_the_zeros_of_triangles_changes_nothing(kernels: torch.device) -> None:
    c = operand(torch.randn(2, 300, 300).tril().to(kernels))
    actual = multiply(c, c.mT, symmetric=True, triangular=True)
    assert torch.equal(actual, multiply(c, c.mT, symmetric=True))


def norms(A: Tensor) -> tuple[Tensor, Tensor]:
    return backend(A.device).norms(A, least=-126)


@pytest.mark.parametrize("n", [5, pytest.param(70, marks=slow), pytest.param(270, marks=slow)])
def test_norms_and_largest_eigenvalues_do_not_depend_on_the_batch(
    n: int, kernels: torch.device
) -> None:
    """Results are bit-identical whatever the padding and the other matrices of the batch."""
    X = torch.randn(3, n, n, dtype=torch.float64)
    A = (X @ X.mT).float() * torch.tensor([1e-30, 1.0, 1e30])[:, None, None]
    a, factors = A.to(kernels), (torch.tensor([1e30, 2.0, 1e-30]) / n).to(kernels)
    (norm, power), largest = norms(a), power_iteration(a, factors)
    assert relative_error(norm / a.double().norm(dim=(-2, -1)), torch.ones(3)) < 1e-7
    assert torch.equal(power.cpu(), norms(A)[1])
    assert ((norm < power) & (power <= 2 * norm)).all()
    exact = power_iteration(A * factors.cpu()[:, None, None])
    assert relative_error(largest, exact) < 1e-5
    larger = functional.pad(a[1:2], (0, 20, 0, 20))
    assert torch.equal(norms(larger)[0], norm[1:2])
    assert torch.equal(power_iteration(larger, factors[1:2]), largest[1:2])
    zeros = torch.zeros(3, 5, 5, device=kernels)
    assert not power_iteration(zeros).any()
    assert [values.tolist() for values in norms(zeros)] == [[0.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("shape", [(40, 40), (130, 70), (200, 130)])
def test_a_correction_squares_the_error(shape: tuple[int, int], kernels: torch.device) -> None:
    m, n = shape
    Q = torch.linalg.qr(torch.randn(2, m, n, dtype=torch.float64))[0]
    Q = (Q @ (torch.eye(n) + 1e-3 * torch.randn(2, n, n)).double()).float()
    E = Q.double().mT @ Q.double() - torch.eye(n)
    q = operand(Q.to(kernels), bound=1.0)
    W, error = backend(q).correction(q)
    U = E.triu(1) + torch.diag_embed(E.diagonal(dim1=-2, dim2=-1) / 2)
    assert relative_error(W.float(), torch.eye(n) - U) < 1e-6
    assert relative_error(error.sum(-1), E.triu().square().sum((-2, -1))) < 1e-3
    plain, plain_error = backend(Q).correction(Q)
    assert relative_error(plain, torch.eye(n) - U) < 1e-6
    assert relative_error(plain_error.sum(-1), E.triu().square().sum((-2, -1))) < 1e-3
    corrected = multiply(operand(Q.to(kernels)), W).cpu().double()
    remaining = (corrected.mT @ corrected - torch.eye(n)).norm(dim=(-2, -1))
    assert (remaining < 5 * E.norm(dim=(-2, -1)) ** 2 + 1e-5).all()


@pytest.mark.parametrize(
    ("n", "block"),
    [(5, 8), (32, 8), (70, 8), pytest.param(200, 2, marks=slow), pytest.param(280, 8, marks=slow)],
)
def test_the_inverse_factor_is_choleskys(
    n: int, block: int, kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronbit.kernels import cholesky

    monkeypatch.setattr(cholesky, "_BLOCK", block)
    X = torch.randn(3, 2 * n + 20, n, dtype=torch.float64)
    S = X.mT @ X
    S[1] -= (2 * n + 20) * torch.eye(n)
    all_true = torch.ones(3, dtype=torch.bool, device=kernels)
    inverse = cholesky.inverse_factor_(S.float().to(kernels), 0.0, all_true)
    assert torch.isfinite(inverse).flatten(1).all(1).tolist() == [True, False, True]
    for i in (0, 2):
        exact = torch.linalg.inv(torch.linalg.cholesky(S[i]).mT)
        assert relative_error(inverse[i], exact) < 1e-5


@pytest.mark.parametrize("n", [1, 32, pytest.param(45, marks=slow), 130])
def test_the_factor_is_choleskys(n: int, kernels: torch.device) -> None:
    X = torch.randn(4, n, 2 * n + 20, dtype=torch.float64)
    A = X @ X.mT
    A[1, -1, -1] = -1.0  # the last pivot is negative
    A[2] -= 3 * A[2].diagonal().amax() * torch.eye(n)  # the first pivot is negative
    C, good = backend(kernels).cholesky_(A.float().to(kernels))
    assert good.tolist() == [True, False, False, True]
    for i in (0, 3):
        exact = torch.linalg.cholesky(A[i])
        assert relative_error(C[i], exact) < 1e-5
        assert (C[i].triu(1) == 0).all()


def test_a_factor_of_small_pivots_is_as_accurate_as_torchs(kernels: torch.device) -> None:
    """C Cᵀ has float32 accuracy, however small the pivots are."""
    n = 200
    V, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    lam = torch.logspace(0, -6, n, dtype=torch.float64)
    A = ((V * lam) @ V.mT).float().unsqueeze(0)
    C, good = backend(kernels).cholesky_(A.clone().to(kernels))
    assert good.all()
    C = C.cpu().double()
    assert relative_error(C @ C.mT, A.double()) < 1e-6
    exact = torch.linalg.cholesky(A.double())
    plain = torch.linalg.cholesky(A).double()
    assert relative_error(C, exact) < 3 * relative_error(plain, exact) + 1e-6


def test_tiny_pivots_eliminate_nothing(kernels: torch.device) -> None:
    """The reference is textbook Cholesky in float64 that skips tiny pivots."""
    from kronbit.kernels.cholesky import inverse_factor_

    n, least = 70, 1e-3
    X = torch.randn(2, n, n, dtype=torch.float64)
    X[:, :, 3] = X[:, :, 1] + X[:, :, 2]
    X[:, :, 40] = X[:, :, 10] - X[:, :, 35]
    X /= X.norm(dim=-2, keepdim=True)
    S = X.mT @ X
    expected = []
    for rest in S.clone():
        L = torch.zeros(n, n, dtype=torch.float64)
        for j in range(n):
            if rest[j, j] < least:
                L[j, j] = least**0.5
            else:
                L[j:, j] = rest[j:, j] / rest[j, j].sqrt()
                rest -= torch.outer(L[:, j], L[:, j])
        assert (L.diagonal() == least**0.5).nonzero().flatten().tolist() == [3, 40]
        expected.append(torch.linalg.inv(L.mT))
    S = S.float().to(kernels)
    actual = inverse_factor_(S.clone(), least, torch.ones(2, dtype=torch.bool, device=kernels))
    assert relative_error(actual, torch.stack(expected)) < 1e-3
    only = torch.tensor([False, True], device=kernels)
    assert torch.equal(inverse_factor_(S, least, only)[1], actual[1])


@pytest.mark.parametrize(("n", "rank"), [(27, 13), (64, 3)])
@pytest.mark.parametrize("ridge", [0.0, pytest.param(1e-9, marks=slow)])
def test_kernels_take_singular_matrices(
    n: int, rank: int, ridge: float, kernels: torch.device
) -> None:
    G = torch.randn(n, rank, dtype=torch.float64) * torch.logspace(0, -3, rank)
    A = G @ G.mT + ridge * torch.eye(n)
    V = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    X = (A @ V).float()[None].to(kernels)
    Q, good = shifted_cholesky_qr(X)
    assert good.all()
    assert orthogonality_error(Q).max() < 1e-5


@slow
def test_tiny_statistics_survive_without_an_initial_value(kernels: torch.device) -> None:
    """With beta=0, the initial value has no weight, and A has the scale of M."""
    p = nn.Parameter(torch.zeros(20, 24, device=kernels))
    optimizer = Shampoo(
        [p], base="sgd", lr=0.1, beta=0, method="eigen", update_every=1, refresh_every=1
    )
    p.grad = 1e-17 * torch.randn(20, 24, device=kernels)
    optimizer.step()
    left = optimizer.state[p]["block_0"]["left"]
    G = torch.randn(20, 24)
    assert left["eigenvalues"].max() > 1e-34
    assert not torch.equal(left["root"].cpu(), torch.eye(20))
    p.grad = G.to(kernels)
    optimizer.step()
    assert torch.isfinite(p.grad).all()
