"""Inverse roots to convergence, by products alone: no eigenvalues, nothing that waits."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from kronbit.linalg import power_iteration
from kronbit.precision import full_precision
from kronbit.products import multiply, operand

# Below that, relative to λmax, rounding errors of a float32 matrix could make it indefinite.
LEAST_RIDGE = 5e-7
_WIDTH = 3e-3  # of the interval from which one more step converges in float32
_CONVERGED = 0.1
_MARGIN = 0.5  # what power iteration finds of λmax, at the least


@cache
def minimax_steps(p: int, least: float) -> tuple[tuple[float, float], ...]:
    """The steps T = a I - b M that bring M with eigenvalues in [least, 1] nearest to I.

    In r = λ^(1/p), a step is r ← a r - b r^(p+1). On an interval [u, v] it is best if it has equal
    values at both ends, as far below 1 as its largest value between them is above: then the next
    interval is the narrowest. Small ones grow by twice as much as in Newton's own (p + 1) / p.

    Args:
        p: 1, 2 or 4.
        least: The smallest eigenvalue relative to the largest.

    Returns:
        (a, b) of each step.
    """
    u, v = min(least ** (1 / p), 1 - 2 * _WIDTH), 1.0
    steps = []
    while True:
        S = (v ** (p + 1) - u ** (p + 1)) / (v - u)
        ends = u * (S - u**p)
        top = (S / (p + 1)) ** (1 / p) * S * p / (p + 1)
        b = 2 / (ends + top)
        steps.append((b * S, b))
        if v - u < _WIDTH:
            return tuple(steps)
        u, v = b * ends, b * top


@full_precision()
def converged_inverse_root(A: Tensor, p: int, damping: float) -> Tensor:
    """(A + λmax ε I)^(-1/p) by a coupled Newton iteration whose steps are the best there are.

    From M = A / ‖A‖_F and H = I: T = a I - b M, H ← H T, M ← T^(p/2) M T^(p/2), until M is I. That
    M is multiplied from both sides keeps it symmetric whatever rounding does, so that most products
    need be computed by half; and it leaves a tenth of the error that T^p M does.

    Args:
        A: (k, n, n), symmetric and positive semi-definite; given away.
        p: 1, 2 or 4.
        damping: ε, relative to the largest eigenvalue of each matrix; at least ``LEAST_RIDGE``.

    Returns:
        (k, n, n). A zero matrix has no inverse root; it gives the identity. NaN where the iteration
        has not converged, as for a matrix that is far from positive semi-definite.
    """
    if p not in (1, 2, 4):
        raise ValueError(f"p must be 1, 2 or 4; got {p!r}")
    n = A.shape[-1]
    ridge = max(damping, LEAST_RIDGE)
    # To largest element 1 first, so that squares stay within float32's range.
    largest = torch.linalg.vector_norm(A, ord=torch.inf, dim=(-2, -1), keepdim=True)
    zero = largest == 0
    M = A.div_(torch.where(zero, 1.0, largest))
    del A  # the first M is not needed to the end
    M.diagonal(dim1=-2, dim2=-1).add_((ridge * power_iteration(M)).unsqueeze(-1))
    # No eigenvalue is larger than that, and none smaller than a √n-th of ε of it, nearly.
    norm = torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True)
    M /= torch.where(zero, 1.0, norm)
    steps = minimax_steps(p, _MARGIN * ridge / (1 + ridge) / math.sqrt(n))
    H: Tensor | None = None
    for a, b in steps[:-1]:
        T = M * -b
        T.diagonal(dim1=-2, dim2=-1).add_(a)
        t = operand(T)
        H = T if H is None else multiply(operand(H), t, symmetric=p > 1)
        if p == 4:
            t = operand(multiply(t, t, symmetric=True))
        if p == 1:
            M = multiply(t, operand(M))
        else:
            M = multiply(t, operand(multiply(operand(M), t)), symmetric=True)
    a, b = steps[-1]
    T = M * -b
    T.diagonal(dim1=-2, dim2=-1).add_(a)
    M.diagonal(dim1=-2, dim2=-1).sub_(1)
    error = torch.linalg.vector_norm(M, ord=torch.inf, dim=(-2, -1), keepdim=True)
    assert H is not None, "there are two steps at least"
    H = multiply(operand(H), operand(T), symmetric=p > 1)
    H *= (largest * norm) ** (-1 / p)
    eye = torch.eye(n, dtype=H.dtype, device=H.device)
    # A comparison with NaN is False.
    return torch.where(zero, eye, torch.where(error < _CONVERGED, H, torch.nan))
