"""Triangular elimination, one launch for each tile along the diagonal.

A launch updates all tiles of the remaining matrix, and the program that updates the next diagonal
tile also factors it, so nothing waits. R is stored in the upper tiles of S, which are never read,
and, where C = Rᵀ is wanted, in the diagonal ones.

Kernels find matrices by a table of addresses, so that a CUDA graph of their launches
stays valid although matrices move.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places of addresses in the table.
AT_S = tl.constexpr(0)
AT_INVERSES = tl.constexpr(1)  # inverses of the diagonal tiles' factors
AT_OUT = tl.constexpr(2)
AT_ONLY = tl.constexpr(3)  # flags of the matrices that are wanted
PLACES = 4


@triton.jit
def note_kernel(places, S, inverses, out, only):
    """Write addresses into the table."""
    tl.store(places + AT_S, S.to(tl.int64))
    tl.store(places + AT_INVERSES, inverses.to(tl.int64))
    tl.store(places + AT_OUT, out.to(tl.int64))
    tl.store(places + AT_ONLY, only.to(tl.int64))


@triton.jit
def find(places, PLACE: tl.constexpr):
    """Return the pointer to a float32 stack."""
    return tl.load(places + PLACE).to(tl.pointer_type(tl.float32))


@triton.jit
def wanted(places, matrix):
    """True if a matrix is wanted."""
    return tl.load(tl.load(places + AT_ONLY).to(tl.pointer_type(tl.int8)) + matrix) != 0


@triton.jit
def _factors(D, least, DIRECT: tl.constexpr, HALF: tl.constexpr):
    """Return L⁻¹, and L if DIRECT, of D = L Lᵀ; not finite where a pivot is not positive.

    Pivots below the least one are replaced by it, and eliminate nothing: elements below them are
    rounding errors, too, and would only grow.

    Gaussian elimination, from D | I to Lᵀ | L⁻¹, except for the square roots of the pivots. Column
    j of D is zero below the pivot from step j on, and column j of the right half is zero until
    then, so both share one column.
    """
    index = tl.arange(0, HALF)
    row, column = index[:, None], index[None, :]
    pivots = tl.zeros((HALF,), dtype=tl.float32)
    L = tl.where(row == column, 1.0, tl.zeros((HALF, HALF), dtype=tl.float32))
    for j in range(HALF):
        D_j = tl.sum(tl.where(row == j, D, 0.0), axis=0)
        pivot = tl.sum(tl.where(index == j, D_j, 0.0), axis=0)
        usable = tl.where(pivot < least, 0.0, 1.0)
        pivot = tl.where(pivot < least, least, pivot)  # NaN stays
        pivots = tl.where(index == j, pivot, pivots)
        # What remains of D is symmetric: its row j is its column j.
        factor = tl.where(index > j, D_j * (usable / pivot), 0.0)
        if DIRECT:
            L = tl.where(column == j, L + factor[:, None], L)
        D_j = tl.where(index == j, 1.0, D_j)
        D = tl.where(column == j, 0.0, D) - factor[:, None] * D_j[None, :]
    W = tl.where(row > column, D, tl.where(row == column, 1.0, 0.0))
    W *= tl.rsqrt(pivots)[:, None]  # of 0: infinity
    return W, L * tl.where(pivots > 0.0, tl.sqrt_rn(pivots), float("nan"))[None, :]


@triton.jit
def exact_dot(a, b):
    """Return a product at float32 accuracy."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _eliminating(W, least, SIZE: tl.constexpr):
    """Return Wᵀ, with zeros for the pivots that were replaced."""
    index = tl.arange(0, SIZE)
    pivots = tl.sum(tl.where(index[:, None] == index[None, :], W, 0.0), axis=0)
    replaced = pivots > 0.999 * tl.rsqrt(least)
    return tl.trans(tl.where(replaced[:, None], 0.0, W))


@triton.jit
def _panel(S, row, before, Wt, n):
    """Return rows of L, in the columns of the previous diagonal tile."""
    A = tl.load(S + row[:, None] * n + before[None, :], mask=(row < n)[:, None], other=0.0)
    return exact_dot(A, Wt)


@triton.jit
def _load_square(S, row, column, n):
    """Return a piece of S, padded by the identity."""
    inside = (row < n)[:, None] & (column < n)[None, :]
    D = tl.load(S + row[:, None] * n + column[None, :], mask=inside, other=0.0)
    return tl.where((row[:, None] == column[None, :]) & (row >= n)[:, None], 1.0, D)


@triton.jit
def _diagonal(
    S, W_place, n, k, least, UPDATE: tl.constexpr, DIRECT: tl.constexpr, TILE: tl.constexpr
):
    """Update diagonal tile k and factor it by quarters: D | 0, C | E."""
    HALF: tl.constexpr = TILE // 2
    half, whole = tl.arange(0, HALF), tl.arange(0, TILE)
    top, bottom = k * TILE + half, k * TILE + HALF + half
    D, C = _load_square(S, top, top, n), _load_square(S, bottom, top, n)
    E = _load_square(S, bottom, bottom, n)
    if UPDATE:
        before = (k - 1) * TILE + whole
        place = W_place - TILE * TILE
        W = tl.load(place + whole[:, None] * TILE + whole[None, :])
        Wt = _eliminating(W, least, TILE)
        L_top, L_bottom = _panel(S, top, before, Wt, n), _panel(S, bottom, before, Wt, n)
        D -= exact_dot(L_top, tl.trans(L_top))
        C -= exact_dot(L_bottom, tl.trans(L_top))
        E -= exact_dot(L_bottom, tl.trans(L_bottom))
        R = S + before[:, None] * n
        tl.store(R + top[None, :], tl.trans(L_top), mask=(top < n)[None, :])
        tl.store(R + bottom[None, :], tl.trans(L_bottom), mask=(bottom < n)[None, :])
    W_D, L_D = _factors(D, least, DIRECT, HALF)
    L = exact_dot(C, _eliminating(W_D, least, HALF))
    E -= exact_dot(L, tl.trans(L))
    W_E, L_E = _factors(E, least, DIRECT, HALF)
    if DIRECT:
        tile = S + top[:, None] * n + top[None, :]
        zero = tl.zeros((HALF, HALF), dtype=tl.float32)
        on, below = (top < n)[:, None], (bottom < n)[:, None]
        tl.store(tile, L_D, mask=on & (top < n)[None, :])
        tl.store(tile + HALF, zero, mask=on & (bottom < n)[None, :])
        tl.store(tile + HALF * n, L, mask=below & (top < n)[None, :])
        tl.store(tile + HALF * n + HALF, L_E, mask=below & (bottom < n)[None, :])
    W_C = exact_dot(exact_dot(W_E, L), W_D)
    corner = W_place + half[:, None] * TILE + half[None, :]
    tl.store(corner, W_D)
    tl.store(corner + HALF, tl.zeros((HALF, HALF), dtype=tl.float32))
    tl.store(corner + HALF * TILE, -W_C)
    tl.store(corner + HALF * TILE + HALF, W_E)


@triton.jit(do_not_specialize=["n", "k", "tiles"])
def step_kernel(
    places, n, k, tiles, least, UPDATE: tl.constexpr, DIRECT: tl.constexpr, TILE: tl.constexpr
):
    """Subtract the columns of diagonal tile k - 1, write its rows of R, and factor tile k."""
    i, j = k + tl.program_id(0), k + tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    if j > i or not wanted(places, matrix):
        return
    S = find(places, AT_S) + matrix * n * n
    W_place = find(places, AT_INVERSES) + (matrix * tiles + k) * TILE * TILE
    if i == k:  # and so j == k
        _diagonal(S, W_place, n, k, least, UPDATE, DIRECT, TILE)
        return
    if UPDATE:
        index = tl.arange(0, TILE)
        row, column, before = i * TILE + index, j * TILE + index, (k - 1) * TILE + index
        inside = (row < n)[:, None] & (column < n)[None, :]
        place = S + row[:, None] * n + column[None, :]
        W = tl.load(W_place - TILE * TILE + index[:, None] * TILE + index[None, :])
        Wt = _eliminating(W, least, TILE)
        D = tl.load(place, mask=inside, other=0.0)
        L_i = _panel(S, row, before, Wt, n)
        D -= exact_dot(L_i, tl.trans(_panel(S, column, before, Wt, n)))
        tl.store(place, D, mask=inside)
        if j == k:
            R = S + before[:, None] * n + row[None, :]
            tl.store(R, tl.trans(L_i), mask=(row < n)[None, :])


@triton.jit(do_not_specialize=["n"])
def transpose_kernel(places, n, TILE: tl.constexpr):
    """Move the tiles above the diagonal below it, and leave zeros."""
    i, j = tl.program_id(0), tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    if j >= i or not wanted(places, matrix):
        return
    S = find(places, AT_S) + matrix * n * n
    index = tl.arange(0, TILE)
    row, column = i * TILE + index, j * TILE + index
    upper = S + column[:, None] * n + row[None, :]
    R = tl.load(upper, mask=(row < n)[None, :], other=0.0)
    tl.store(S + row[:, None] * n + column[None, :], tl.trans(R), mask=(row < n)[:, None])
    tl.store(upper, tl.zeros((TILE, TILE), dtype=tl.float32), mask=(row < n)[None, :])
