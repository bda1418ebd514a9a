"""Batched linear algebra of the factors: (k, n, n) stacks, full float32, no host sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kronbit.precision import full_precision
from kronbit.products import (
    Operand,
    compose,
    correction,
    multiply,
    normalise_columns,
    operand,
)

# X -> an orthonormal basis of its columns, and of which matrices it can be trusted.
QR: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

# ‖QᵀQ - I‖, of which a correction leaves its square.
_CORRECTABLE = 5e-3
# Of the trace: a pass with it improves the condition by about 2000.
_SHIFT = 3e-7
_NEWTON_TOLERANCE = 1e-6
_NEWTON_GROWTH = 1.2


def _nonzero(divisor: Tensor) -> Tensor:
    """The divisor with 1 for 0: zero stays zero under it, and NaN and infinity stay visible."""
    return torch.where(divisor == 0, 1.0, divisor)


@full_precision()
def rectified(V: Operand, steps: int) -> Operand:
    """Rectify the orthogonality of V: ``steps`` times V ← 1.5 V - 0.5 V Vᵀ V (Björck).

    The formula is the same for Vᵀ, so it does not matter whether eigenvectors are rows or columns.

    Args:
        V: (k, n, n), nearly orthogonal, by rows.
        steps: t1 or t2 of the paper.

    Returns:
        The rectified stack (``V`` itself when ``steps`` is 0).
    """
    for _ in range(steps):
        V = compose(compose(V, V.mT, symmetric=True), V, C=V, alpha=-0.5, beta=1.5)
    return V


def bjorck(V: Tensor, steps: int) -> Tensor:
    """``rectified`` for a float32 stack."""
    return rectified(operand(V.float().contiguous(), bounded=True), steps).float()


@full_precision()
def orthogonality_error(Q: Tensor) -> Tensor:
    """The largest |Qᵀ Q - I| of each matrix, (k,)."""
    q = operand(Q.float(), bounded=True)
    gram = multiply(q.mT, q, symmetric=True)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    error: Tensor = torch.linalg.vector_norm(gram, ord=torch.inf, dim=(-2, -1))
    return error


def _whitened(X: Operand, shift: float, room: Tensor | None) -> Operand:
    """X R⁻¹ with Rᵀ R = Xᵀ X + shift trace(Xᵀ X) I; NaN, where there is no such R.

    ``room`` is overwritten, if there is some.
    """
    S = multiply(X.mT, X, symmetric=True, out=room)
    if shift:
        diagonal = S.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(shift * diagonal.sum(-1, keepdim=True))
    if not isinstance(X, Tensor):
        from kronbit.kernels.cholesky import inverse_factor_

        W = inverse_factor_(S)
        w = operand(W)
        del W
        return compose(X, w)
    lower, info = torch.linalg.cholesky_ex(S)
    del S
    lower.masked_fill_((info != 0)[:, None, None], torch.nan)
    solved: Tensor = torch.linalg.solve_triangular(lower.mT, X, upper=True, left=False)
    return solved


def cholesky_qr(X: Tensor, shifts: Sequence[float] = ()) -> tuple[Tensor, Tensor]:
    """QR(X) by Cholesky-QR on normalised columns, corrected twice: all matrix products.

    Args:
        X: (k, m, n) with m >= n, float32; given away: it may be overwritten.
        shifts: Each asks for one more pass in front, with that much of the trace added to the
            diagonal: it hardly ever fails, and leaves a matrix that is better conditioned.

    Returns:
        Q: (k, m, n), with R's diagonal non-negative.
        good: bool (k,): False where X is too ill-conditioned for it: Cholesky failed, or Q was not
            orthogonal enough for the corrections. That Q is worthless.
    """
    with full_precision():
        X = X.contiguous()
        x = normalise_columns(X)
        # The operand is a copy, or X itself.
        room = X if X.shape[-2] == X.shape[-1] and not isinstance(x, Tensor) else None
        for shift in (*shifts, 0.0):
            x = _whitened(x, shift, room)
        W, _ = correction(x)
        x = compose(x, W)
        W, squares = correction(x)
        # A comparison with NaN is False, so a broken matrix counts as bad.
        return multiply(x, W, out=room), squares.sum(-1) <= _CORRECTABLE**2


def shifted_cholesky_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """``cholesky_qr`` in two passes, for matrices of condition up to about 1e6."""
    return cholesky_qr(X, (_SHIFT,))


def thrice_shifted_cholesky_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """``cholesky_qr`` in four passes, for matrices that are singular but for rounding."""
    return cholesky_qr(X, (_SHIFT,) * 3)


def householder_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """QR(X) by Householder, with the signs that Cholesky-QR gives: R has diagonal >= 0.

    Args:
        X: (k, m, n) with m >= n, float32; given away: it is overwritten.

    Returns:
        Q: (k, m, n).
        good: bool (k,), True.
    """
    X /= _nonzero(torch.linalg.vector_norm(X, dim=-2, keepdim=True))
    good = torch.ones(X.shape[:1], dtype=torch.bool, device=X.device)
    # One by one: CUDA's batched QR of a singular matrix is not orthogonal.
    return torch.stack([_signed_q(*torch.linalg.qr(x)) for x in X]), good


def _signed_q(Q: Tensor, R: Tensor) -> Tensor:
    return Q * torch.where(R.diagonal() < 0, -1.0, 1.0).to(Q.dtype)


def subspace_iteration(A: Operand, AV: Tensor, steps: int, qr: QR) -> tuple[Tensor, Tensor]:
    """The paper's randomized SVD: ``steps`` times P ← QR(A P), from P = V.

    Args:
        A: (k, n, n), symmetric.
        AV: A V with V the start, eigenvectors of an earlier A as columns; given away.
        steps: Number of QR iterations, at least 1.
        qr: ``cholesky_qr`` or a more robust one.

    Returns:
        P: (k, n, n), approximate eigenvectors of A as columns.
        good: bool (k,): whether every QR could be trusted.
    """
    with full_precision():
        P, good = qr(AV)
        for _ in range(steps - 1):
            P, again = qr(multiply(A, operand(P, bounded=True)))
            good = good & again
    return P, good


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
        t = operand(T)
        # Not symmetric products: a naively quantised A is not quite symmetric.
        H_next = multiply(operand(H), t)
        power = p
        while power > 1:
            t = operand(multiply(t, t))
            power //= 2
        M_next = multiply(t, operand(M))
        error_next = torch.linalg.vector_norm(
            M_next - eye, ord=torch.inf, dim=(-2, -1), keepdim=True
        )
        active = active & (error_next <= _NEWTON_GROWTH * error)
        H = torch.where(active, H_next, H)
        M = torch.where(active, M_next, M)
        error = torch.where(active, error_next, error)
        active = active & (error > _NEWTON_TOLERANCE)
    return torch.where(scale == 0, eye, H * divisor ** (-1 / p))
