"""The paper's method: eigenvalues in float32, eigenvectors quantised."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.dense import condition
from kronbit.factors.storage import Layout, Leaves, MatrixStorage, decay_weights, root_storage
from kronbit.linalg import (
    QR,
    bjorck,
    inverse_root,
    orthogonality_error,
    rectified,
    subspace_iteration,
)
from kronbit.products import Operand, column_dots, compose, multiply, operand, scale_rows

_TO_THE_END = 4  # Björck steps after which 4-bit eigenvectors are orthogonal to float32


class Eigen:
    """A = V Λ Vᵀ as (λ, Ū): Algorithms PU and PIRU.

    U is stored transposed: a row is an eigenvector, so that a quantisation block never leaves it.
    Float32 eigenvectors (32 bits, or a small order) are orthogonal and are not rectified.
    """

    takes_qr = True

    def __init__(self, format: Format, p: int) -> None:
        self.p = p
        self.vectors = MatrixStorage(format.statistic, plain="eigenvectors", diagonal=False)
        self.root = root_storage(format.root)

    def layout(self, order: int) -> Layout:
        """Tensors of one preconditioner and its root."""
        eigenvalues: Layout = {"eigenvalues": ((order,), torch.float32)}
        return eigenvalues | self.vectors.layout(order) | self.root.layout(order)

    def start(self, eye: Tensor, value: float) -> Leaves:
        """A0 = value I as λ = value, U = I."""
        return self._encode(torch.full_like(eye[..., 0], value), eye)

    def update(
        self, leaves: Mapping[str, Tensor], M: Tensor, config: Config, qr: QR
    ) -> tuple[Leaves, Tensor]:
        """PU: rectify, average M in, one or more QR iterations, quantise the eigenvectors."""
        lam, Vt = leaves["eigenvalues"], self._rectified(leaves, config.update_rectify)
        decay, weight = decay_weights(config.beta)
        # No element of a positive semi-definite matrix exceeds its largest diagonal one.
        largest = lam.amax(-1)
        bound = M.diagonal(dim1=-2, dim2=-1).amax(-1).mul_(weight).add_(largest, alpha=decay)
        # A = β V Λ Vᵀ + (1 - β) M
        scaled = scale_rows(Vt, lam, largest)
        A = compose(Vt.mT, scaled, C=M, alpha=decay, beta=weight, symmetric=True, bound=bound)
        del scaled
        AV = multiply(A, Vt.mT, out=M)
        del Vt
        P, good = subspace_iteration(A, AV, config.qr_iterations, qr)
        # λ = diag(Pᵀ A P)
        lam = column_dots(P, multiply(A, operand(P, bounded=True)))
        del A
        return self._encode(lam, P), good

    def refresh(self, leaves: Mapping[str, Tensor], config: Config) -> Leaves:
        """PIRU: Â = V (Λ + max(λ) ε I)^(-1/p) Vᵀ, or by Schur-Newton from A."""
        if config.root == "schur_newton":
            A = self._matrix(leaves, config.update_rectify)
            return self.root.encode(inverse_root(A, self.p, config.damping, config.newton_steps))
        lam, Vt = leaves["eigenvalues"], self._rectified(leaves, config.refresh_rectify)
        largest = lam.amax(-1, keepdim=True)
        # A zero statistic has no inverse root; 1 in its place gives the identity.
        damped = torch.where(largest == 0, 1.0, lam + largest * config.damping)
        return self.root.encode(_scaled_square(Vt, damped.pow_(-1 / self.p)))

    def enlarged(self, leaves: Mapping[str, Tensor], order: int) -> Leaves:
        """A 32-bit statistic as a part of a larger one: the rest has unit vectors and largest λ.

        Updates and roots of the part are those of the small one, and what is outside stays zero.
        """
        lam, U = leaves["eigenvalues"], leaves["eigenvectors"]
        k, n = lam.shape
        larger = torch.eye(order, dtype=U.dtype, device=U.device).repeat(k, 1, 1)
        larger[:, :n, :n] = U
        rest = lam.amax(-1, keepdim=True).expand(k, order - n)
        return {"eigenvalues": torch.cat([lam, rest], -1), "eigenvectors": larger}

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """A = V Λ Vᵀ, float32, from eigenvectors rectified to full orthogonality."""
        return self._matrix(leaves, rectify=_TO_THE_END)

    def encode_matrix(self, A: Tensor) -> Leaves:
        """The statistic that stands for a given A."""
        lam, U = torch.linalg.eigh(A.double())
        return self._encode(lam.float(), U.float())

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """Condition of A and orthogonality of the stored eigenvectors for ``diagnostics``."""
        V = self.vectors.decode(leaves).mT
        return {
            "condition": condition(leaves["eigenvalues"]),
            "orthogonality_error": float(orthogonality_error(V).amax()),
            "rectified_orthogonality_error": float(orthogonality_error(bjorck(V, 1)).amax()),
        }

    def _rectified(self, leaves: Mapping[str, Tensor], steps: int) -> Operand:
        """Vᵀ, eigenvectors as rows, after Björck's steps if they were quantised."""
        rows = self.vectors.operand(leaves)
        return rectified(rows, 0 if self.vectors.quantizer.bits == 32 else steps)

    def _matrix(self, leaves: Mapping[str, Tensor], rectify: int) -> Tensor:
        return _scaled_square(self._rectified(leaves, rectify), leaves["eigenvalues"])

    def _encode(self, lam: Tensor, P: Tensor) -> Leaves:
        """(λ, Q(P)), with λ clamped at 0: a negative one would have no root."""
        return {"eigenvalues": lam.clamp(min=0)} | self.vectors.encode(P.mT)


def _scaled_square(Vt: Operand, lam: Tensor) -> Tensor:
    """V diag(λ) Vᵀ, with eigenvectors as rows of Vᵀ."""
    return multiply(Vt.mT, scale_rows(Vt, lam, lam.amax(-1)), symmetric=True)
