"""The paper's method: eigenvalues in float32, eigenvectors quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.dense import condition, decay_weights
from kronbit.factors.storage import Layout, Leaves, root_storage, statistic_storage
from kronbit.linalg.backend import Operand, backend
from kronbit.linalg.orthogonal import (
    bjorck,
    orthogonality_error,
    qr_of,
    rectified,
    subspace_iteration,
)
from kronbit.linalg.products import multiply, operand
from kronbit.linalg.roots import inverse_root

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain

_CONVERGED = 4  # Björck steps after which 4-bit eigenvectors are orthogonal up to float32 rounding


class Spectrum(NamedTuple):
    """Eigenvalues (k, n), and eigenvectors as rows of (k, n, n)."""

    lam: Tensor
    vectors: Operand

    def part(self, rows: slice, order: int) -> Spectrum:
        """Return the matrices of the given rows without their padding."""
        assert isinstance(self.vectors, Tensor)
        return Spectrum(self.lam[rows, :order], self.vectors[rows, :order, :order])

    def trace(self) -> Tensor:
        """Return the traces of A, (k,)."""
        return self.lam.sum(-1)


class Eigen:
    """Stores A = V Λ Vᵀ as λ and Ū = Q(U), from which V is restored: Algorithms PU and PIRU.

    U is stored transposed: a row is an eigenvector, so no quantisation block spans two of them.
    Float32 eigenvectors (32 bits, or a small order) are orthogonal and are not rectified.
    """

    # A nearly singular matrix needs a more robust QR.
    repairs: tuple[str, ...] = ("shifted_qr", "householder")
    root_repairs: tuple[str, ...] = ()

    def __init__(self, format: Format) -> None:
        self.p = format.p
        self.vectors = statistic_storage(format, "eigenvectors", "square")
        self.root = root_storage(format)

    def allows_padding(self, config: Config, attempt: int | None) -> bool:
        """True if padding changes no result.

        Schur-Newton depends on the norm of the whole matrix, and the last attempt at an update
        takes one matrix at a time.
        """
        if config.root == "schur_newton" or attempt == len(self.repairs):
            return False
        if attempt is None and config.trace_scaling:
            return False
        # A λ of zero could not be distinguished from padding.
        return config.beta > 0 and config.start_value > 0

    def layout(self, order: int) -> Layout:
        """Return the tensors of one preconditioner and its root."""
        eigenvalues: Layout = {"eigenvalues": ((order,), torch.float32)}
        return eigenvalues | self.vectors.layout(order) | self.root.layout(order)

    def start(self, eye: Tensor, value: float) -> Leaves:
        """Return A0 = value I as λ = value, U = I."""
        return self.encode(Spectrum(torch.full_like(eye[..., 0], value), eye))

    def restore(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Spectrum:
        """Return (λ, D(Ū)) of all stacks, concatenated.

        A matrix of a smaller order is padded with unit eigenvectors, whose λ is its largest.
        Neither an update nor a refresh mixes the matrix with its padding.
        """
        lams = [_padded(leaves["eigenvalues"], order) for leaves in slices]
        lam = lams[0] if len(lams) == 1 else torch.cat(lams)
        return Spectrum(lam, self.vectors.operand(slices, order))

    def update(
        self, statistic: Spectrum, M: Tensor, config: Config, attempt: int, chain: Chain | None
    ) -> tuple[Spectrum, Tensor]:
        """PU: rectify the eigenvectors, average M in, and run one or more QR iterations."""
        lam, Vt = statistic.lam, self._rectified(statistic, config.update_rectify)
        del statistic
        decay, weight = decay_weights(config.beta)
        # No element of a positive semi-definite matrix exceeds its largest diagonal element.
        largest = lam.amax(-1)
        bound = M.diagonal(dim1=-2, dim2=-1).amax(-1).mul_(weight).add_(largest, alpha=decay)
        # A = β V Λ Vᵀ + (1 - β) M
        by = backend(Vt)
        scaled = by.scale_rows(Vt, lam, largest)
        A = by.compose(Vt.mT, scaled, C=M, alpha=decay, beta=weight, symmetric=True, bound=bound)
        del scaled
        AV = multiply(A, Vt.mT, out=M)
        del Vt
        P, good = subspace_iteration(A, AV, config.qr_iterations, qr_of(attempt, chain))
        # λ = diag(Pᵀ A P)
        lam = by.column_dots(P, multiply(A, operand(P, bound=1.0)))
        return Spectrum(lam, P.mT), good

    def refresh(self, statistic: Spectrum, config: Config) -> Tensor:
        """PIRU: Â = V (Λ + max(λ) ε I)^(-1/p) Vᵀ, or by Schur-Newton from A."""
        if config.root == "schur_newton":
            A = self._matrix(statistic, config.update_rectify)
            return inverse_root(A, self.p, config.damping, config.newton_steps)
        lam, Vt = statistic.lam, self._rectified(statistic, config.refresh_rectify)
        del statistic
        largest = lam.amax(-1, keepdim=True)
        # A zero statistic has no inverse root; 1 in its place gives the identity.
        damped = torch.where(largest == 0, 1.0, lam + largest * config.damping)
        # Not pow: on a CPU, its last bit depends on the position of an element.
        for _ in range(self.p.bit_length() - 1):  # p = 1, 2 or 4
            damped.sqrt_()
        return _scaled_square(Vt, damped.reciprocal_())

    def encode(self, statistic: Spectrum) -> Leaves:
        """Return (λ, Q(U)), with λ clamped at 0: a negative λ has no root."""
        assert isinstance(statistic.vectors, Tensor)
        vectors = self.vectors.encode(statistic.vectors)
        return {"eigenvalues": statistic.lam.clamp(min=0)} | vectors

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return A = V Λ Vᵀ, float32, from eigenvectors rectified to full orthogonality."""
        statistic = self.restore([leaves], leaves["eigenvalues"].shape[-1])
        return self._matrix(statistic, rectify=_CONVERGED)

    def encode_matrix(self, A: Tensor) -> Leaves:
        """Encode a given A."""
        lam, U = torch.linalg.eigh(A.double())
        return self.encode(Spectrum(lam.float(), U.float().mT))

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """Return A's condition number and errors of orthogonality, for ``diagnostics``."""
        V = self.vectors.decode(leaves).mT
        return {
            "condition": condition(leaves["eigenvalues"]),
            "orthogonality_error": float(orthogonality_error(V).amax()),
            "rectified_orthogonality_error": float(orthogonality_error(bjorck(V, 1)).amax()),
        }

    def _rectified(self, statistic: Spectrum, steps: int) -> Operand:
        """Return Vᵀ, eigenvectors as rows; quantised ones are rectified by Björck's steps."""
        exact = self.vectors.quantizer.bits == 32
        return rectified(statistic.vectors, 0 if exact else steps)

    def _matrix(self, statistic: Spectrum, rectify: int) -> Tensor:
        return _scaled_square(self._rectified(statistic, rectify), statistic.lam)


def _padded(lam: Tensor, order: int) -> Tensor:
    """Pad λ (k, n) with its largest element."""
    n = lam.shape[-1]
    if n == order:
        return lam
    return torch.cat([lam, lam.amax(-1, keepdim=True).expand(-1, order - n)], -1)


def _scaled_square(Vt: Operand, lam: Tensor) -> Tensor:
    """Return V diag(λ) Vᵀ, with eigenvectors as rows of Vᵀ."""
    return multiply(Vt.mT, backend(Vt).scale_rows(Vt, lam, lam.amax(-1)), symmetric=True)
