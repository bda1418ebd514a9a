"""Orthogonal factors of stacks (k, n, n) in full float32: Björck, QR, subspace iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kronbit.linalg.backend import Operand, backend, nonzero
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import multiply, operand

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain

# X -> an orthonormal basis of its columns, and bool (k,): False where it cannot be trusted.
QR: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

_CORRECTABLE = 5e-3  # the largest ‖QᵀQ - I‖ that is corrected: a correction squares it
_ROUNDING = 3e-7  # pivots of XᵀX below this fraction of its trace are rounding errors
# Q is correctable if no element of R⁻¹ exceeds this fraction of the bound set by the least pivot.
_ONE_PASS = 0.7
_SHIFTED_PASSES = 3


@full_precision()
def rectified(V: Operand, steps: int) -> Operand:
    """Rectify the orthogonality of V: ``steps`` times V ← 1.5 V - 0.5 V Vᵀ V (Björck).

    V is (k, n, n), stored by rows. The formula is the same for Vᵀ, so eigenvectors may be rows or
    columns. ``steps`` is t1 or t2 of the paper: steps at an update or at a refresh.
    """
    compose = backend(V).compose
    for _ in range(steps):
        V = compose(compose(V, V.mT, symmetric=True), V, C=V, alpha=-0.5, beta=1.5)
    return V


def bjorck(V: Tensor, steps: int) -> Tensor:
    """Rectify a float32 stack as ``rectified`` does."""
    return rectified(operand(V.float().contiguous(), bound=1.0), steps).float()


@full_precision()
def orthogonality_error(Q: Tensor) -> Tensor:
    """Return the largest |Qᵀ Q - I| of each matrix, (k,)."""
    q = operand(Q.float(), bound=1.0)
    gram = multiply(q.mT, q, symmetric=True)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    error: Tensor = torch.linalg.vector_norm(gram, ord=torch.inf, dim=(-2, -1))
    return error


def rounded_order(order: int) -> int:
    """Round an order up to a multiple of 1024. Orders with equal results may share a batch."""
    return 1024 * -(-order // 1024)


def least_pivot(order: int) -> float:
    """Return the least pivot of XᵀX, with a diagonal of ones, that is not a rounding error.

    The order is rounded up, because a result must not depend on the matrices that share the batch.
    For small orders, this pivot is too large: good columns are postponed and cost a second pass.
    """
    return _ROUNDING * rounded_order(order)


def _corrected(Q: Operand, buffer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Correct a nearly orthonormal Q twice; return the result, and bool (k,), True if trusted."""
    by = backend(Q)
    W, _ = by.correction(Q)
    Q = by.compose(Q, W)
    W, squares = by.correction(Q)
    # A comparison with NaN is False, so a broken matrix counts as bad.
    return multiply(Q, W, out=buffer), squares.sum(-1) <= _CORRECTABLE**2


def cholesky_qr(X: Tensor, chain: Chain | None = None) -> tuple[Tensor, Tensor]:
    """Compute QR(X) by Cholesky-QR on normalised columns and two corrections: matrix products only.

    Args:
        X: (k, m, n) with m >= n, float32; may be overwritten.
        chain: Launches factorisations that are repeated, if kernels do them.

    Returns:
        Q, (k, m, n), with R's diagonal non-negative; and bool (k,): False where X is too
        ill-conditioned, so that Cholesky failed or Q was not orthogonal enough to be corrected.
    """
    with full_precision():
        X = X.contiguous()
        buffer, least = _buffer(X), least_pivot(X.shape[-1])
        limit = _ONE_PASS / math.sqrt(least)
        return _corrected(backend(X.device).whitened(X, buffer, least, limit, chain), buffer)


def shifted_cholesky_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``cholesky_qr`` after shifted passes, for matrices singular up to rounding."""
    with full_precision():
        for _ in range(_SHIFTED_PASSES):
            X = X.contiguous()
            # A pass divides the condition number by 100 to 1000, and never fails.
            X = backend(X.device).shifted(X, _buffer(X), least_pivot(X.shape[-1]))
        return cholesky_qr(X)


def _buffer(X: Tensor) -> Tensor | None:
    """Return X if products may overwrite it, because kernels work on copies; else None."""
    return X if X.shape[-2] == X.shape[-1] and backend(X.device).by_kernels else None


def householder_qr(X: Tensor) -> tuple[Tensor, Tensor]:
    """Compute QR(X) by Householder; see ``cholesky_qr``. Overwrites X. Q is always trusted."""
    X /= nonzero(torch.linalg.vector_norm(X, dim=-2, keepdim=True))
    signed = []
    for x in X:  # one by one: CUDA's batched QR of a singular matrix is not orthogonal
        Q, R = torch.linalg.qr(x)
        signed.append(Q * torch.where(R.diagonal() < 0, -1.0, 1.0).to(Q.dtype))
    return torch.stack(signed), torch.ones(len(X), dtype=torch.bool, device=X.device)


def qr_of(attempt: int, chain: Chain | None) -> QR:
    """Return the QR for an attempt: the first is the fastest, the last is the most robust."""
    return (partial(cholesky_qr, chain=chain), shifted_cholesky_qr, householder_qr)[attempt]


def subspace_iteration(A: Operand, AV: Tensor, steps: int, qr: QR) -> tuple[Tensor, Tensor]:
    """Run the paper's randomized SVD: ``steps`` times P ← QR(A P), from P = V.

    Args:
        A: (k, n, n), symmetric.
        AV: A V with V the start, eigenvectors of an earlier A as columns; may be overwritten.
        steps: Number of QR iterations, at least 1.
        qr: ``cholesky_qr`` or a more robust one.

    Returns:
        P, (k, n, n), approximate eigenvectors of A as columns; bool (k,), True if every QR is good.
    """
    with full_precision():
        P, good = qr(AV)
        for _ in range(steps - 1):
            P, trusted = qr(multiply(A, operand(P, bound=1.0)))
            good = good & trusted
    return P, good
