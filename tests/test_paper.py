"""Quantisation errors: the paper's printed numbers, and its orderings on our own matrices."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import angle, orthogonal, relative_error
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kronbit import Quantizer, Shampoo
from kronbit.linalg import bjorck

# Table "Quantization errors in A^(-1/4)", synthetic A2, 4 bits: (mapping, rectified) -> NRE, AE.
PRINTED = {
    ("dt", False): (0.1224, 7.0144),
    ("dt", True): (0.0878, 4.9960),
    ("linear2", False): (0.0942, 5.3998),
    ("linear2", True): (0.0669, 3.8166),
}
Pair = tuple[float, float]


def inverse_fourth_root(A: Tensor) -> Tensor:
    """By singular values, as the paper defines A^s: a quantised A may be indefinite."""
    lam, U = torch.linalg.eigh(A)
    return (U * lam.abs().clamp(min=1e-30).pow(-0.25)) @ U.T


def restored(X: Tensor, mapping: str, bits: int = 4) -> Tensor:
    quantizer = Quantizer(bits, mapping, 64)
    return quantizer.dequantize(quantizer.quantize(X.float()), X.shape[-1]).double()


def errors(exact: Tensor, A: Tensor) -> Pair:
    root = inverse_fourth_root(A)
    return relative_error(root, exact), angle(root, exact)


def of_vectors(U: Tensor, lam: Tensor, mapping: str, rectified: bool) -> Pair:
    """QM = U: quantise the eigenvectors; a block lies inside one of them."""
    V = restored(U.T.contiguous(), mapping).T
    V = bjorck(V[None], 1)[0].double() if rectified else V
    return errors((U * lam.pow(-0.25)) @ U.T, (V * lam) @ V.T)


def of_matrix(U: Tensor, lam: Tensor, mapping: str, bits: int = 4) -> Pair:
    """QM = A: quantise the matrix, its diagonal kept."""
    A = (U * lam) @ U.T
    off = A - torch.diag(A.diagonal())
    kept = restored(off, mapping, bits) + torch.diag(A.diagonal())
    return errors((U * lam.pow(-0.25)) @ U.T, kept)


@functools.cache
def synthetic() -> tuple[Tensor, Tensor]:
    """A2: a random orthogonal matrix and two distinct eigenvalues, at order 1200."""
    torch.manual_seed(0)
    lam = torch.ones(1200, dtype=torch.float64)
    lam[:1155] = 1000.0
    return orthogonal(1200, 1200), lam


@functools.cache
def trained() -> list[tuple[Tensor, Tensor]]:
    """Eigenvectors and eigenvalues of preconditioners of a 32-bit run on digits."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 192), nn.Tanh())
    model.append(nn.Linear(192, 10))
    optimizer = Shampoo(
        model.parameters(), lr=3e-3, bits=32, update_every=5, refresh_every=20, first_refresh=5
    )
    for _ in range(200):
        batch = torch.randint(0, len(x), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    found = []
    for p in model.parameters():
        for side in optimizer.state[p].get("block_0", {}).values():
            lam, U = torch.linalg.eigh(side["matrix"].double())
            lam = lam.clamp(min=0) + 1e-6 * lam.max()
            if len(lam) >= 64 and lam.max() / lam.min() >= 1e4:
                found.append((U, lam))
    return found


@pytest.mark.parametrize(("mapping", "rectified"), list(PRINTED))
def test_errors_of_quantised_eigenvectors_are_the_printed_ones(
    mapping: str, rectified: bool
) -> None:
    found = of_vectors(*synthetic(), mapping, rectified)
    assert found == pytest.approx(PRINTED[mapping, rectified], rel=0.025)


def check_orderings(U: Tensor, lam: Tensor) -> None:
    plain, rectified = (of_vectors(U, lam, "linear2", again) for again in (False, True))
    matrix = of_matrix(U, lam, "linear2")
    tree = of_vectors(U, lam, "dt", False)
    for i in range(2):  # NRE, then AE
        assert rectified[i] < plain[i] < matrix[i]
        assert plain[i] < tree[i]


def test_orderings_hold_on_the_synthetic_matrix() -> None:
    check_orderings(*synthetic())


def test_orderings_hold_on_preconditioners_of_our_own_training() -> None:
    matrices = trained()
    assert len(matrices) >= 3
    for U, lam in matrices:
        check_orderings(U, lam)
