"""The triangular factor of Cholesky-QR, batched: R⁻¹ with Rᵀ R = S.

The factorisation goes tile by tile along the diagonal, one launch each. All tiles of the remaining
matrix are updated at once, and the program that updates the next diagonal tile goes on to factor
it, so that nothing waits. R takes the place of S's upper tiles, which are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch

_TILE = 32
_STEP_WARPS, _INVERSE_WARPS = 1, 2


@triton.jit
def _inverse_factor(D, TILE: tl.constexpr):
    """L⁻¹ of a symmetric tile D = L Lᵀ, and whether a pivot was not positive.

    Gauss, from D | I to Lᵀ | L⁻¹ but for the square roots of the pivots. Column j of D is zero
    below the pivot from step j on, and that of the right half is zero until then: they share it.
    """
    index = tl.arange(0, TILE)
    row, column = index[:, None], index[None, :]
    pivots = tl.zeros((TILE,), dtype=tl.float32)
    for j in range(TILE):
        D_j = tl.sum(tl.where(row == j, D, 0.0), axis=0)
        pivot = tl.sum(tl.where(index == j, D_j, 0.0), axis=0)
        pivots = tl.where(index == j, pivot, pivots)
        # What remains of D is symmetric: its row j is its column j.
        factor = tl.where(index > j, D_j * (1.0 / pivot), 0.0)
        D_j = tl.where(index == j, 1.0, D_j)
        D = tl.where(column == j, 0.0, D) - factor[:, None] * D_j[None, :]
    W = tl.where(row > column, D, tl.where(row == column, 1.0, 0.0))
    failed = tl.max(tl.where(pivots > 0, 0, 1))
    return W * tl.rsqrt(pivots)[:, None], failed


@triton.jit(do_not_specialize=["n", "k", "tiles"])
def _step_kernel(S, inverses, failed, n, k, tiles, UPDATE: tl.constexpr, TILE: tl.constexpr):
    """Subtract the columns of diagonal tile k - 1, write its rows of R, and factor tile k."""
    i, j = k + tl.program_id(0), k + tl.program_id(1)
    if j > i:
        return
    matrix = tl.program_id(2).to(tl.int64)
    index = tl.arange(0, TILE)
    S += matrix * n * n
    W_place = inverses + (matrix * tiles + k) * TILE * TILE + index[:, None] * TILE + index[None, :]
    row, column = i * TILE + index, j * TILE + index
    inside = (row < n)[:, None] & (column < n)[None, :]
    place = S + row[:, None] * n + column[None, :]
    D = tl.load(place, mask=inside, other=0.0)
    if UPDATE:
        before = (k - 1) * TILE + index
        Wt = tl.trans(tl.load(W_place - TILE * TILE))
        L_i = tl.load(S + row[:, None] * n + before[None, :], mask=(row < n)[:, None], other=0.0)
        L_i = tl.dot(L_i, Wt, input_precision="tf32x3")
        L_j = tl.load(
            S + column[:, None] * n + before[None, :], mask=(column < n)[:, None], other=0.0
        )
        L_jt = tl.trans(tl.dot(L_j, Wt, input_precision="tf32x3"))
        D -= tl.dot(L_i, L_jt, input_precision="tf32x3")
        if j == k:
            R_place = S + before[:, None] * n + row[None, :]
            tl.store(R_place, tl.trans(L_i), mask=(row < n)[None, :])
        if i != k:
            tl.store(place, D, mask=inside)
    if i == k:  # and so j == k: the next diagonal tile
        D = tl.where((index[:, None] == index[None, :]) & (row >= n)[:, None], 1.0, D)
        W, bad = _inverse_factor(D, TILE)
        tl.store(W_place, W)
        if bad > 0:
            tl.store(failed + matrix, 1)


@triton.jit(do_not_specialize=["n", "tiles"])
def _inverse_kernel(R, inverses, out, n, tiles, TILE: tl.constexpr):
    """Rows of R⁻¹, tile by tile: every program has rows of its own."""
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0)
    index = tl.arange(0, TILE)
    row = i * TILE + index
    R += matrix * n * n
    out += matrix * n * n
    inverses += matrix * tiles * TILE * TILE + index[:, None] * TILE + index[None, :]
    for k in range(tiles):
        column = k * TILE + index
        inside = (row < n)[:, None] & (column < n)[None, :]
        place = out + row[:, None] * n + column[None, :]
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        if k >= i:
            if k == i:
                total += tl.where(index[:, None] == index[None, :], 1.0, 0.0)
            for j in range(i, k):
                earlier = j * TILE + index
                left = out + row[:, None] * n + earlier[None, :]
                right = R + earlier[:, None] * n + column[None, :]
                total -= tl.dot(
                    tl.load(left, mask=(row < n)[:, None], other=0.0),
                    tl.load(right, mask=(column < n)[None, :], other=0.0),
                    input_precision="tf32x3",
                )
            W = tl.load(inverses + k * TILE * TILE)
            total = tl.dot(total, tl.trans(W), input_precision="tf32x3")
        tl.store(place, total, mask=inside)
        tl.debug_barrier()  # the next tiles read what this program has just written


def inverse_factor_(S: Tensor) -> tuple[Tensor, Tensor]:
    """R⁻¹ with Rᵀ R = S, for a contiguous float32 stack (k, n, n), which is overwritten.

    Returns:
        R⁻¹, upper triangular, and bool (k,): False where S was not positive definite.
    """
    k, n, _ = S.shape
    tiles = triton.cdiv(n, _TILE)
    inverses = torch.empty(k, tiles, _TILE, _TILE, dtype=torch.float32, device=S.device)
    failed = torch.zeros(k, dtype=torch.int32, device=S.device)
    for step in range(tiles):
        left = tiles - step if step else 1
        launch(
            _step_kernel,
            (left, left, k),
            S,
            inverses,
            failed,
            n,
            step,
            tiles,
            UPDATE=step > 0,
            TILE=_TILE,
            num_warps=_STEP_WARPS,
        )
    out = torch.empty_like(S)
    launch(
        _inverse_kernel,
        (tiles, k),
        S,
        inverses,
        out,
        n,
        tiles,
        TILE=_TILE,
        num_warps=_INVERSE_WARPS,
    )
    return out, failed == 0
