"""Batched linear algebra of the factors: (k, n, n) stacks, float32, full precision, no host sync.

The one exception to "no host sync" is ``orthonormalize``: it reads one flag per call to decide
whether some matrix needs the Householder fallback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronbit.precision import full_precision

_ORTHOGONALITY_TOLERANCE = 1e-4
_NEWTON_TOLERANCE = 1e-6
_NEWTON_GROWTH = 1.2


def _nonzero(divisor: Tensor) -> Tensor:
    """The divisor with 1 for 0: zero stays zero under it, and NaN and infinity stay visible."""
    return torch.where(divisor == 0, 1.0, divisor)


@full_precision()
def bjorck(V: Tensor, steps: int) -> Tensor:
    """Rectify the orthogonality of V: ``steps`` times V ← 1.5 V - 0.5 V Vᵀ V.

    The formula is the same for Vᵀ, so it does not matter whether eigenvectors are rows or columns.

    Args:
        V: (k, n, n), nearly orthogonal.
        steps: t1 or t2 of the paper.

    Returns:
        The rectified stack (``V`` itself when ``steps`` is 0).
    """
    V = V.float()
    for _ in range(steps):
        V = torch.baddbmm(V, V @ V.mT, V, beta=1.5, alpha=-0.5)
    return V


@full_precision()
def orthogonality_error(Q: Tensor) -> Tensor:
    """The largest |Qᵀ Q - I| of each matrix, (k,)."""
    gram = Q.mT @ Q
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    error: Tensor = torch.linalg.vector_norm(gram, ord=torch.inf, dim=(-2, -1))
    return error


def _cholesky_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """Q = X R⁻¹ with Rᵀ R = Xᵀ X, and whether Cholesky succeeded."""
    lower, info = torch.linalg.cholesky_ex(X.mT @ X)
    Q = torch.linalg.solve_triangular(lower.mT, X, upper=True, left=False)
    return Q, info == 0


def _householder(X: Tensor) -> Tensor:
    """Q of Householder's QR, with the signs that Cholesky-QR gives: R has diagonal >= 0."""
    Q, R = torch.linalg.qr(X)
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(X.dtype)
    signed: Tensor = Q * signs.unsqueeze(-2)
    return signed


@full_precision()
def orthonormalize(X: Tensor, fallbacks: Tensor | None = None) -> Tensor:
    """QR(X): an orthonormal basis of the columns, R having a non-negative diagonal.

    Cholesky-QR, twice, on normalised columns; it is all matrix products. Where Cholesky fails or
    the result is less orthogonal than 1e-4, that matrix alone is done again by Householder.

    Args:
        X: (k, m, n) with m >= n.
        fallbacks: A counter (an integer tensor of one element on X's device) that is increased
            by the number of matrices that needed Householder.

    Returns:
        Q, (k, m, n).
    """
    X = X.float()
    norms = torch.linalg.vector_norm(X, dim=-2, keepdim=True)
    X = X / _nonzero(norms)
    Q, first = _cholesky_qr(X)
    Q, second = _cholesky_qr(Q)
    # A comparison with NaN is False, so a broken matrix counts as bad.
    good = first & second & (orthogonality_error(Q) <= _ORTHOGONALITY_TOLERANCE)
    if not good.all():
        bad = ~good
        Q[bad] = _householder(X[bad])
        if fallbacks is not None:
            fallbacks += bad.sum()
    return Q


def subspace_iteration(A: Tensor, V: Tensor, steps: int, fallbacks: Tensor | None = None) -> Tensor:
    """The paper's randomized SVD: ``steps`` times P ← QR(A P), from P = V.

    Args:
        A: (k, n, n), symmetric.
        V: (k, n, n), the start: eigenvectors of an earlier A as columns.
        steps: Number of QR iterations.
        fallbacks: See ``orthonormalize``.

    Returns:
        P, (k, n, n): approximate eigenvectors of A as columns.
    """
    P = V
    for _ in range(steps):
        with full_precision():
            P = A.float() @ P.float()
        P = orthonormalize(P, fallbacks)
    return P


@full_precision()
def power_iteration(A: Tensor, steps: int = 10) -> Tensor:
    """λmax of positive semi-definite matrices.

    The start is the unit vector of the largest diagonal element: deterministic, and never
    orthogonal to the leading eigenvectors, since its Rayleigh quotient is at least trace / n.

    Args:
        A: (k, n, n).
        steps: Number of iterations.

    Returns:
        (k,), zero for a zero matrix.
    """
    A = A.float()
    start = A.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
    x = torch.zeros(A.shape[:-1], dtype=A.dtype, device=A.device).scatter_(-1, start, 1.0)
    x = x.unsqueeze(-1)
    for _ in range(steps):
        x = A @ x
        # By the largest element: a sum of squares would under- or overflow first.
        largest = x.abs().amax(-2, keepdim=True)
        x = x / _nonzero(largest)
    norm = (x * x).sum((-2, -1))
    return (x * (A @ x)).sum((-2, -1)).abs() / _nonzero(norm)


@full_precision()
def inverse_root(A: Tensor, p: int, damping: float, steps: int) -> Tensor:
    """(A + λmax ε I)^(-1/p) by the coupled Newton (Schur-Newton) iteration.

    From M = z A, H = z^(1/p) I with z = (1 + p) / (2 ‖A‖_F): T = ((p + 1) I - M) / p, H ← H T,
    M ← Tᵖ M, until M is I. The count is fixed; a matrix that has converged, or whose error grew
    by a fifth, is frozen at its last good root. Ten steps gain at most ((p + 1) / p)^10: at high
    condition they are not converged, and act like a larger damping.

    Args:
        A: (k, n, n), positive semi-definite. Never written to.
        p: 1, 2 or 4.
        damping: ε, relative to the largest eigenvalue of each matrix.
        steps: Number of iterations.

    Returns:
        (k, n, n). A zero matrix has no inverse root; it gives the identity.
    """
    if p not in (1, 2, 4):
        raise ValueError(f"p must be 1, 2 or 4; got {p!r}")
    A = A.float()
    # Work on A scaled to largest element 1, so that neither squares nor z leave float32's range.
    scale = torch.linalg.vector_norm(A, ord=torch.inf, dim=(-2, -1), keepdim=True)
    divisor = _nonzero(scale)
    M = A / divisor
    ridge = damping * power_iteration(M)
    M.diagonal(dim1=-2, dim2=-1).add_(ridge.unsqueeze(-1))
    norm = torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True)
    z = (1 + p) / (2 * _nonzero(norm))
    M *= z
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    H = z ** (1 / p) * eye
    error = torch.linalg.vector_norm(M - eye, ord=torch.inf, dim=(-2, -1), keepdim=True)
    active = error > _NEWTON_TOLERANCE
    for _ in range(steps):
        T = M * (-1 / p)
        T.diagonal(dim1=-2, dim2=-1).add_((p + 1) / p)
        H_next = H @ T
        power = p
        while power > 1:
            T = T @ T
            power //= 2
        M_next = T @ M
        error_next = torch.linalg.vector_norm(
            M_next - eye, ord=torch.inf, dim=(-2, -1), keepdim=True
        )
        active = active & (error_next <= _NEWTON_GROWTH * error)
        H = torch.where(active, H_next, H)
        M = torch.where(active, M_next, M)
        error = torch.where(active, error_next, error)
        active = active & (error > _NEWTON_TOLERANCE)
    return torch.where(scale == 0, eye, H * divisor ** (-1 / p))
