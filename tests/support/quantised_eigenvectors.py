"""The quantities of the paper's Lemma 1 for eigenvectors that kronbit quantises and rectifies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kronbit.lab.quantization.errors import Statistic, restored_vectors
from kronbit.quantization import Quantizer


def nre(approximate: Tensor, exact: Tensor) -> float:
    """Return the normwise relative error, ‖approximate - exact‖ / ‖exact‖."""
    return float((approximate - exact).norm() / exact.norm())


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two matrices."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def alpha_beta(V: Tensor, U: Tensor) -> tuple[float, float]:
    """Return the least α and β of Lemma 1: ‖Δu_i‖ ≤ α and ⟨u_i, u_i + Δu_i⟩ ≥ 1 - β."""
    return float((V - U).norm(dim=0).max()), float((1 - (U * V).sum(0)).max())


def composed(lam: Tensor, U: Tensor, s: float) -> Tensor:
    """Return U Λ^s Uᵀ."""
    return (U * lam**s) @ U.mT


def power(A: Tensor, s: float) -> Tensor:
    """Return A^s by an eigendecomposition of A."""
    return composed(*torch.linalg.eigh((A + A.mT) / 2), s)


def sharp(alpha: float) -> float:
    """Return the bound on NRE that Lemma 1 (2) implies, for α ≤ √2. It is sharper than (1).

    For orthogonal V, ‖Δu‖² = 2 (1 - ⟨u, v⟩), so that β = α²/2; and ‖B + ΔB‖ = ‖B‖, so that
    NRE² = 2 (1 - cos) ≤ 2 (1 - (1 - β)²) = 2 α² (1 - α²/4). The printed 2 α is √2 too large. Bound
    (2) requires 1 - β ≥ 0, that is, α ≤ √2.
    """
    return math.sqrt(2) * alpha * math.sqrt(1 - alpha**2 / 4)


@dataclass(frozen=True)
class Restored:
    """Eigenvectors V after quantisation and Björck's steps, against U.

    Attributes:
        alpha: α.
        beta: β.
        length: The mean of ‖v‖² over the columns.
        skew: The largest |Vᵀ V - I|. It is zero if V is orthogonal, as the lemma assumes.
        errors: By power s, (NRE, cosine) of (V Λ Vᵀ)^s.
    """

    alpha: float
    beta: float
    length: float
    skew: float
    errors: dict[float, tuple[float, float]]

    @property
    def orthogonal(self) -> bool:
        """True if V is orthogonal to the rounding of float32, the dtype of Björck's steps."""
        return self.skew < 1e-5

    @property
    def nre_bound(self) -> float:
        """The bound of Lemma 1 (1)."""
        return 2 * self.alpha

    @property
    def cosine_bound(self) -> float:
        """The bound of Lemma 1 (2)."""
        return (1 - self.beta) ** 2


def restored(
    statistic: Statistic, quantizer: Quantizer, steps: int, powers: Iterable[float]
) -> Restored:
    """Quantise a matrix's eigenvectors, take ``steps`` Björck steps, and measure the error."""
    V, U, lam = restored_vectors(statistic, quantizer, steps), statistic.U, statistic.lam
    # Decompose V Λ Vᵀ: unless V is orthogonal, its powers are not V Λ^s Vᵀ.
    eigenvalues, Q = torch.linalg.eigh((V * lam) @ V.mT)
    errors = {}
    for s in powers:
        B, B_1 = composed(lam, U, s), composed(eigenvalues, Q, s)
        errors[s] = nre(B_1, B), cosine(B, B_1)
    skew = float((V.mT @ V - torch.eye(len(V), dtype=V.dtype)).abs().max())
    return Restored(*alpha_beta(V, U), float(V.square().sum(0).mean()), skew, errors)
