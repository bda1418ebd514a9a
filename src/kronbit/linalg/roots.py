"""Inverse roots by products alone: no eigendecomposition, and the host never waits."""

from __future__ import annotations

import math
from functools import cache, partial

import torch
from torch import Tensor

from kronbit.kernels.polynomial import Polynomial, Product
from kronbit.linalg.backend import backend, nonzero
from kronbit.linalg.orthogonal import rounded_order
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import multiply, operand

# Smaller ridges, relative to λmax and ‖A‖_F, leave float32 matrices indefinite by rounding.
LEAST_RIDGE, _LEAST_OF_NORM = 5e-7, 1.5e-7
_ENOUGH = 5e-5  # a root this close to 1 has only rounding errors left
_CONVERGING = 0.3  # no element of M - I is larger before the last step
_MARGIN = 0.5  # power iteration finds at least this fraction of λmax
# Polynomials are steep at the upper end of their interval: rounding errors must not lie beyond it.
_HEADROOM = 1e-3
_EXCHANGES = 30
_LEAST_EXPONENT = -126  # of float32: smaller numbers have already lost bits
_UNSCALED = 5  # steps of a power iteration between which a vector may grow or shrink
_NEWTON_TOLERANCE, _NEWTON_GROWTH = 1e-6, 1.2


@cache
def minimax_steps(p: int, least: float) -> tuple[tuple[float, float, float], ...]:
    """Return the steps T = a I + b M + c M² that bring M, with λ in [least, 1], closest to I.

    In r = λ^(1/p), a step is r ← r (a + b r^p + c r^2p). The best step of that form minimises the
    largest distance of r from 1 on its interval, so the next interval is the narrowest. Each step
    gains as much as several of Newton's. ``p`` is 2 or 4; return (a, b, c) of each step.
    """
    u, v = least ** (1 / p), 1.0
    steps = []
    while v - u > 2 * _ENOUGH:
        a, b, c, error = _best_step(p, u, v * (1 + _HEADROOM))
        steps.append((a, b, c))
        u, v = 1 - error, 1 + error
    return tuple(steps)


def steps_of(order: int, p: int, damping: float) -> tuple[tuple[float, float, float], ...]:
    """Return the steps for a matrix of this order, divided by up to twice its Frobenius norm."""
    ridge = max(damping, LEAST_RIDGE)
    # No eigenvalue is larger than the norm, and λmax is at least norm / √n. The order is rounded
    # up, because a result must not depend on the matrices that share the batch.
    least = max(_MARGIN * ridge / math.sqrt(rounded_order(order)), _LEAST_OF_NORM)
    return minimax_steps(p, least / 2 / 2 ** _doublings(ridge))


def _doublings(ridge: float) -> int:
    """Return by how many powers of two, rounded up, a large ridge raises the largest eigenvalue."""
    return math.ceil(math.log2(1 + ridge)) if ridge > _HEADROOM else 0


def _best_step(p: int, u: float, v: float) -> tuple[float, float, float, float]:
    """Return (a, b, c) and the error E of the best step on [u, v], by Remez's exchange.

    The step gives 1 - E, 1 + E, 1 - E, 1 + E at u, at its two extremes, and at v.
    """
    points = [u, u + (v - u) / 4, v - (v - u) / 4, v]
    ones = torch.ones(4, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        rows = [[r, r ** (p + 1), r ** (2 * p + 1), (-1) ** i] for i, r in enumerate(points)]
        a, b, c, error = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), ones).tolist()
        # Where the derivative a + (p + 1) b y + (2 p + 1) c y² is zero, y = r^p.
        middle, half = -(p + 1) * b, math.sqrt(((p + 1) * b) ** 2 - 4 * (2 * p + 1) * a * c)
        extremes = ((middle + side) / (2 * (2 * p + 1) * c) for side in (-half, half))
        points[1:3] = (y ** (1 / p) for y in extremes)
    return a, b, c, error


@full_precision()
def converged_inverse_root(
    A: Tensor, p: int, damping: float, orders: Tensor | None = None
) -> Tensor:
    """Return (A + λmax ε I)^(-1/p) by a coupled iteration with minimax steps.

    From M = A / s, where s is a power of two above ‖A‖_F, and H = I: T = a I + b M + c M²,
    H ← H T and M ← T^(p/2) M T^(p/2), until M is I. All of these are polynomials of A, so every
    product is symmetric, and half of it need not be computed.

    Args:
        A: (k, n, n), symmetric and positive semi-definite. Its storage may be overwritten.
        p: 1, 2 or 4.
        damping: ε, relative to the largest eigenvalue; raised if rounding requires it.
        orders: int32 (k,), the orders before padding with zeros; ``None`` if none was padded.

    Returns:
        (k, n, n), undefined beyond the orders; the identity for a zero matrix. NaN where the
        iteration has not converged, as for a matrix that is far from positive semi-definite.
    """
    if p not in (1, 2, 4):
        raise ValueError(f"p must be 1, 2 or 4; got {p!r}")
    ridge = max(damping, LEAST_RIDGE)
    by = backend(A.device)
    # No eigenvalue of A is larger than the norm; s is a power of two: dividing is exact.
    norm, s = by.norms(A, _LEAST_EXPONENT)
    inverse = 1 / s
    by.add_ridge_(A, power_iteration(A, inverse), norm, s, ridge, _LEAST_OF_NORM, orders)
    if _doublings(ridge):
        s *= 2.0 ** _doublings(ridge)
        inverse = 1 / s
    scale = inverse
    for _ in range(p.bit_length() - 1):
        scale = scale.sqrt()
    steps = steps_of(A.shape[-1], max(p, 2), damping)
    H = by.evaluate(_iteration(p, steps), A, s, scale, orders)
    H.diagonal(dim1=-2, dim2=-1).masked_fill_((norm == 0).unsqueeze(-1), 1.0)
    return H


@cache
def _iteration(p: int, steps: tuple[tuple[float, float, float], ...]) -> Polynomial:
    """Return the products of the coupled iteration from M = A / s. For p = 1, H² is the result."""
    assert len(steps) > 1, "H is a product"
    products: list[Product] = []

    def product(A: int, B: int, C: int | None = None, **numbers: float) -> int:
        products.append(Product(A, B, C, **numbers))
        return len(products)

    q, grown = max(p, 2), 1.0
    M, H = 0, -1
    for a, b, c in steps[:-1]:
        T = product(M, M, M, alpha=c, beta=b, diagonal=a, bound=a)
        grown *= a
        H = T if H < 0 else product(H, T, bound=grown)  # it begins as I
        if q == 4:
            T = product(T, T, bound=a * a)
        # No eigenvalue is above 2^q now.
        M = product(T, product(M, T, bound=2**q), bound=2**q)
    a, b, c = steps[-1]
    T = product(M, M, M, alpha=c, beta=b, diagonal=a)
    checked = T
    if p == 1:
        H = T = product(H, T, bound=grown)
    product(H, T)
    return Polynomial(tuple(products), checked, _CONVERGING)


@full_precision()
def power_iteration(A: Tensor, factors: Tensor | None = None, steps: int = 10) -> Tensor:
    """Return λmax of positive semi-definite matrices, times their ``factors``.

    The start is the unit vector of the largest diagonal element: deterministic, and never
    orthogonal to the leading eigenvectors, since its Rayleigh quotient is at least trace / n.

    A is (k, n, n), float32, contiguous. ``factors``, (k,), bring the largest element and the norm
    of each matrix close to 1. ``steps`` is a multiple of 10.
    """
    if steps % (2 * _UNSCALED):
        raise ValueError(f"steps must be a multiple of {2 * _UNSCALED}; got {steps}")
    if factors is None:
        factors = torch.ones(len(A), dtype=A.dtype, device=A.device)
    return backend(A.device).power_iteration(A, factors, steps, _UNSCALED)


@full_precision()
def inverse_root(A: Tensor, p: int, damping: float, steps: int) -> Tensor:
    """Return (A + λmax ε I)^(-1/p) by the coupled Newton (Schur-Newton) iteration.

    From M = z A, H = z^(1/p) I with z = (1 + p) / (2 ‖A‖_F): T = ((p + 1) I - M) / p, H ← H T,
    M ← Tᵖ M, until M is I. The number of steps is fixed; a matrix that has converged, or
    whose error grew by a fifth, is frozen at its last good root. Ten steps raise a root by at most
    ((p + 1) / p)^10. At a high condition number, they do not converge: the effect is that of a
    larger damping.

    Args:
        A: (k, n, n), positive semi-definite; unchanged. A zero matrix gives the identity.
        p: 1, 2 or 4.
        damping: ε, relative to the largest eigenvalue of each matrix.
        steps: Number of iterations.
    """
    if p not in (1, 2, 4):
        raise ValueError(f"p must be 1, 2 or 4; got {p!r}")
    A = A.float()
    # Work on A scaled to largest element 1, so that neither squares nor z leave float32's range.
    largest = partial(torch.linalg.vector_norm, ord=torch.inf, dim=(-2, -1), keepdim=True)
    scale = largest(A)
    divisor = nonzero(scale)
    M = A / divisor
    ridge = damping * power_iteration(M)
    M.diagonal(dim1=-2, dim2=-1).add_(ridge.unsqueeze(-1))
    norm = torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True)
    z = (1 + p) / (2 * nonzero(norm))
    M *= z
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    H = z ** (1 / p) * eye
    error = largest(M - eye)
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
        error_next = largest(M_next - eye)
        active = active & (error_next <= _NEWTON_GROWTH * error)
        H = torch.where(active, H_next, H)
        M = torch.where(active, M_next, M)
        error = torch.where(active, error_next, error)
        active = active & (error > _NEWTON_TOLERANCE)
    return torch.where(scale == 0, eye, H * divisor ** (-1 / p))
