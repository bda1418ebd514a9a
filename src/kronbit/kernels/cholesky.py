"""Triangular factors, batched: R⁻¹ with Rᵀ R = S for Cholesky-QR, or C = Rᵀ itself.

The factorisation goes tile by tile along the diagonal, one launch each. All tiles of the remaining
matrix are updated at once, and the program that updates the next diagonal tile goes on to factor
it, so that nothing waits. R takes the place of S's upper tiles, which are never read, and, where
C is wanted, of the diagonal ones.

R is inverted in blocks along its diagonal, and those are joined, two by two.

That is a long chain of short launches, so it is replayed as a CUDA graph. Kernels find matrices by
a table of addresses (``_Place``), so that the graph stays valid although they move.
"""

from __future__ import annotations

import enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch
from kronbit.replay import Replay

_TILE = 32
_BLOCK = 8  # tiles that are inverted one after the other; larger blocks are joined
_JOINED, _DEPTH = 64, 16  # tiles of what joins two blocks
_STEP_WARPS, _WARPS = 1, 4


class _Place(enum.IntEnum):
    """Which address stands where."""

    S = 0
    INVERSES = 1  # of the diagonal tiles' factors
    OUT = 2
    ONLY = 3  # which matrices are wanted


_S: tl.constexpr = tl.constexpr(int(_Place.S))
_INVERSES: tl.constexpr = tl.constexpr(int(_Place.INVERSES))
_OUT: tl.constexpr = tl.constexpr(int(_Place.OUT))
_ONLY: tl.constexpr = tl.constexpr(int(_Place.ONLY))


@triton.jit
def _note_kernel(places, S, inverses, out, only):
    """Write down where everything is."""
    tl.store(places + _S, S.to(tl.int64))
    tl.store(places + _INVERSES, inverses.to(tl.int64))
    tl.store(places + _OUT, out.to(tl.int64))
    tl.store(places + _ONLY, only.to(tl.int64))


@triton.jit
def _find(places, PLACE: tl.constexpr):
    return tl.load(places + PLACE).to(tl.pointer_type(tl.float32))


@triton.jit
def _wanted(places, matrix):
    return tl.load(tl.load(places + _ONLY).to(tl.pointer_type(tl.int8)) + matrix) != 0


@triton.jit
def _factors(D, least, DIRECT: tl.constexpr, HALF: tl.constexpr):
    """L⁻¹ of a symmetric matrix D = L Lᵀ; not finite if a pivot is not positive. If wanted, L, too.

    Pivots below the least one are replaced by it, and nothing is eliminated by them: what stands
    below them is rounding, too, and would only grow.

    Gauss, from D | I to Lᵀ | L⁻¹ but for the square roots of the pivots. Column j of D is zero
    below the pivot from step j on, and that of the right half is zero until then: they share it.
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
def _exact_dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _eliminating(W, least, SIZE: tl.constexpr):
    """Wᵀ, with zeros for the pivots that were replaced."""
    index = tl.arange(0, SIZE)
    pivots = tl.sum(tl.where(index[:, None] == index[None, :], W, 0.0), axis=0)
    replaced = pivots > 0.999 * tl.rsqrt(least)
    return tl.trans(tl.where(replaced[:, None], 0.0, W))


@triton.jit
def _panel(S, row, before, Wt, n):
    """Some rows of L, in the columns of the diagonal tile before."""
    A = tl.load(S + row[:, None] * n + before[None, :], mask=(row < n)[:, None], other=0.0)
    return _exact_dot(A, Wt)


@triton.jit
def _load_square(S, row, column, n):
    """A piece of S. Beyond the matrix it is the identity."""
    inside = (row < n)[:, None] & (column < n)[None, :]
    D = tl.load(S + row[:, None] * n + column[None, :], mask=inside, other=0.0)
    return tl.where((row[:, None] == column[None, :]) & (row >= n)[:, None], 1.0, D)


@triton.jit
def _diagonal(
    S, W_place, n, k, least, UPDATE: tl.constexpr, DIRECT: tl.constexpr, TILE: tl.constexpr
):
    """Bring diagonal tile k up to date and factor it, by quarters: D | 0, C | E."""
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
        D -= _exact_dot(L_top, tl.trans(L_top))
        C -= _exact_dot(L_bottom, tl.trans(L_top))
        E -= _exact_dot(L_bottom, tl.trans(L_bottom))
        R = S + before[:, None] * n
        tl.store(R + top[None, :], tl.trans(L_top), mask=(top < n)[None, :])
        tl.store(R + bottom[None, :], tl.trans(L_bottom), mask=(bottom < n)[None, :])
    W_D, L_D = _factors(D, least, DIRECT, HALF)
    L = _exact_dot(C, _eliminating(W_D, least, HALF))
    E -= _exact_dot(L, tl.trans(L))
    W_E, L_E = _factors(E, least, DIRECT, HALF)
    if DIRECT:
        tile = S + top[:, None] * n + top[None, :]
        zero = tl.zeros((HALF, HALF), dtype=tl.float32)
        on, below = (top < n)[:, None], (bottom < n)[:, None]
        tl.store(tile, L_D, mask=on & (top < n)[None, :])
        tl.store(tile + HALF, zero, mask=on & (bottom < n)[None, :])
        tl.store(tile + HALF * n, L, mask=below & (top < n)[None, :])
        tl.store(tile + HALF * n + HALF, L_E, mask=below & (bottom < n)[None, :])
    W_C = _exact_dot(_exact_dot(W_E, L), W_D)
    corner = W_place + half[:, None] * TILE + half[None, :]
    tl.store(corner, W_D)
    tl.store(corner + HALF, tl.zeros((HALF, HALF), dtype=tl.float32))
    tl.store(corner + HALF * TILE, -W_C)
    tl.store(corner + HALF * TILE + HALF, W_E)


@triton.jit(do_not_specialize=["n", "k", "tiles"])
def _step_kernel(
    places, n, k, tiles, least, UPDATE: tl.constexpr, DIRECT: tl.constexpr, TILE: tl.constexpr
):
    """Subtract the columns of diagonal tile k - 1, write its rows of R, and factor tile k."""
    i, j = k + tl.program_id(0), k + tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    if j > i or not _wanted(places, matrix):
        return
    S = _find(places, _S) + matrix * n * n
    W_place = _find(places, _INVERSES) + (matrix * tiles + k) * TILE * TILE
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
        D -= _exact_dot(L_i, tl.trans(_panel(S, column, before, Wt, n)))
        tl.store(place, D, mask=inside)
        if j == k:
            R = S + before[:, None] * n + row[None, :]
            tl.store(R, tl.trans(L_i), mask=(row < n)[None, :])


@triton.jit(do_not_specialize=["n"])
def _transpose_kernel(places, n, TILE: tl.constexpr):
    """Move the tiles above the diagonal below it; what they leave is zero."""
    i, j = tl.program_id(0), tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    if j >= i or not _wanted(places, matrix):
        return
    S = _find(places, _S) + matrix * n * n
    index = tl.arange(0, TILE)
    row, column = i * TILE + index, j * TILE + index
    upper = S + column[:, None] * n + row[None, :]
    R = tl.load(upper, mask=(row < n)[None, :], other=0.0)
    tl.store(S + row[:, None] * n + column[None, :], tl.trans(R), mask=(row < n)[:, None])
    tl.store(upper, tl.zeros((TILE, TILE), dtype=tl.float32), mask=(row < n)[None, :])


@triton.jit(do_not_specialize=["n", "tiles"])
def _blocks_kernel(places, n, tiles, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """R⁻¹ of blocks along the diagonal, tile by tile: every program has rows of its own.

    It also writes the zeros to the left of them.
    """
    matrix = tl.program_id(1).to(tl.int64)
    if not _wanted(places, matrix):
        return
    i = tl.program_id(0)
    index = tl.arange(0, TILE)
    row = i * TILE + index
    R = _find(places, _S) + matrix * n * n
    out = _find(places, _OUT) + matrix * n * n
    inverses = _find(places, _INVERSES) + matrix * tiles * TILE * TILE
    inverses += index[:, None] * TILE + index[None, :]
    for k in range(i):
        column = k * TILE + index
        zero = tl.zeros((TILE, TILE), dtype=tl.float32)
        tl.store(out + row[:, None] * n + column[None, :], zero, mask=(row < n)[:, None])
    last = tl.minimum((i // BLOCK + 1) * BLOCK, tiles)
    for k in range(i, last):
        column = k * TILE + index
        inside = (row < n)[:, None] & (column < n)[None, :]
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        if k == i:
            total += tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        for j in range(i, k):
            earlier = j * TILE + index
            left = out + row[:, None] * n + earlier[None, :]
            right = R + earlier[:, None] * n + column[None, :]
            total -= _exact_dot(
                tl.load(left, mask=(row < n)[:, None], other=0.0),
                tl.load(right, mask=(column < n)[None, :], other=0.0),
            )
        total = _exact_dot(total, tl.trans(tl.load(inverses + k * TILE * TILE)))
        tl.store(out + row[:, None] * n + column[None, :], total, mask=inside)
        tl.debug_barrier()  # the next tiles read what this program has just written


@triton.jit(do_not_specialize=["n", "size"])
def _join_kernel(places, n, size, SECOND: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """What stands above B in R⁻¹, of two blocks A and B along its diagonal, and C above B in R.

    First T = C B, which goes transposed below A in R, where nothing is needed any more; then -A T.
    """
    matrix = tl.program_id(2).to(tl.int64)
    if not _wanted(places, matrix):
        return
    R = _find(places, _S) + matrix * n * n
    out = _find(places, _OUT) + matrix * n * n
    first = 2 * size * tl.program_id(1)  # of A; B begins at second
    second = first + size
    width = tl.minimum(n - second, size)
    across = tl.cdiv(size, TILE)
    i, j = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    if j >= width:
        return
    row, column = i + tl.arange(0, TILE), j + tl.arange(0, TILE)
    wide = (column < width)[None, :]
    T = R + first + (second + column)[None, :] * n  # by columns
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    if SECOND:
        A = out + (first + row)[:, None] * n + first
        for start in range(i, size, DEPTH):  # A is upper triangular
            k = start + tl.arange(0, DEPTH)
            total -= _exact_dot(tl.load(A + k[None, :]), tl.load(T + k[:, None], mask=wide))
        place = out + (first + row)[:, None] * n + (second + column)[None, :]
        tl.store(place, total, mask=wide)
    else:
        C = R + (first + row)[:, None] * n + second
        B = out + second * n + second + column[None, :]
        for start in range(0, tl.minimum(j + TILE, width), DEPTH):  # and so is B
            k = start + tl.arange(0, DEPTH)
            there = k < width
            total += _exact_dot(
                tl.load(C + k[None, :], mask=there[None, :], other=0.0),
                tl.load(B + k[:, None] * n, mask=there[:, None] & wide, other=0.0),
            )
        tl.store(T + row[:, None], total, mask=wide)


def inverse_factor_(S: Tensor, least: float, only: Tensor, chain: Chain | None = None) -> Tensor:
    """R⁻¹ with Rᵀ R = S, for a contiguous float32 stack (k, n, n), which is overwritten.

    Args:
        S: Symmetric matrices; upper tiles are not read.
        least: Pivots below it are replaced by it; such a row of R is zero beside its diagonal.
        only: bool (k,): which of the matrices are wanted; the others' results are undefined.
        chain: What launches it, if that is done more than once.

    Returns:
        R⁻¹, upper triangular; it holds NaN or infinity where a pivot was not positive.
    """
    k, n, _ = S.shape
    inverses = S.new_empty(k, triton.cdiv(n, _TILE), _TILE, _TILE)
    out = torch.empty_like(S)
    chain = chain or Chain(S.device, graphs=False)
    launch(_note_kernel, (1,), chain.places, S, inverses, out, only)
    chain.invert(k, n, least)
    return out


def factor_(A: Tensor, chain: Chain | None = None) -> Tensor:
    """Overwrite a contiguous float32 stack (k, n, n) by its lower triangular factors, A = C Cᵀ.

    Args:
        A: Symmetric matrices; upper tiles are not read.
        chain: What launches it, if that is done more than once.

    Returns:
        bool (k,): of which matrices all pivots were positive. The others' factors are worthless.
    """
    k, n, _ = A.shape
    inverses = A.new_empty(k, triton.cdiv(n, _TILE), _TILE, _TILE)
    everyone = torch.ones(k, dtype=torch.bool, device=A.device)
    chain = chain or Chain(A.device, graphs=False)
    launch(_note_kernel, (1,), chain.places, A, inverses, A, everyone)
    chain.factor(k, n)
    return (A.diagonal(dim1=-2, dim2=-1) > 0).all(-1)  # False for NaN


class Chain:
    """The launches of ``inverse_factor_`` and ``factor_``, for matrices wherever they are.

    Args:
        device: Where they are.
        graphs: Whether the launches may be a CUDA graph.
    """

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self.places = torch.zeros(len(_Place), dtype=torch.int64, device=device)
        self._replay = Replay(device, graphs)

    @property
    def graph_refused(self) -> str | None:
        """Why the launches could not be captured; ``None`` if nothing was refused."""
        return self._replay.refused

    def invert(self, k: int, n: int, least: float) -> None:
        """R⁻¹ of k matrices of order n, whose places have been noted."""
        self._replay(("R⁻¹", k, n, least), lambda: self._invert(k, n, least))

    def factor(self, k: int, n: int) -> None:
        """C of k matrices of order n, whose places have been noted."""
        self._replay(("C", k, n), lambda: self._factor(k, n))

    def _eliminate(self, k: int, n: int, least: float, direct: bool) -> int:
        tiles = -(-n // _TILE)
        for step in range(tiles):
            left = tiles - step if step else 1
            launch(
                _step_kernel,
                (left, left, k),
                self.places,
                n,
                step,
                tiles,
                least,
                UPDATE=step > 0,
                DIRECT=direct,
                TILE=_TILE,
                num_warps=_STEP_WARPS,
            )
        return tiles

    def _factor(self, k: int, n: int) -> None:
        tiles = self._eliminate(k, n, 0.0, direct=True)
        grid = (tiles, tiles, k)
        launch(_transpose_kernel, grid, self.places, n, TILE=_TILE, num_warps=_STEP_WARPS)

    def _invert(self, k: int, n: int, least: float) -> None:
        tiles = self._eliminate(k, n, least, direct=False)
        blocks = {"BLOCK": _BLOCK, "TILE": _TILE, "num_warps": _WARPS}
        launch(_blocks_kernel, (tiles, k), self.places, n, tiles, **blocks)
        size = _BLOCK * _TILE
        while size < n:
            pairs = -(-(n - size) // (2 * size))
            grid = ((size // _JOINED) ** 2, pairs, k)
            for second in (False, True):
                launch(
                    _join_kernel,
                    grid,
                    self.places,
                    n,
                    size,
                    SECOND=second,
                    TILE=_JOINED,
                    DEPTH=_DEPTH,
                    num_warps=_WARPS,
                )
            size *= 2
