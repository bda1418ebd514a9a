"""Triangular factors, batched: R⁻¹ with Rᵀ R = S for Cholesky-QR, or C = Rᵀ itself.

A launch updates all tiles of the remaining matrix, and the program that updates the next diagonal
tile also factors it, so nothing waits. R is stored in the upper tiles of S, which are never read,
and, where C = Rᵀ is wanted, in the diagonal ones.

R is inverted in blocks along its diagonal, which are then joined in pairs. This is a long chain of
short launches, so it is replayed as a CUDA graph. Kernels find matrices by a table of addresses, so
that the graph stays valid when matrices move. ``whitened`` is X R⁻¹ for Cholesky-QR.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.graphs import Replay
from kronbit.kernels.launch import launch
from kronbit.kernels.matmul import compose, multiply
from kronbit.kernels.split import Split, measured_split, normalise_columns, take_

_TILE = 32
_BLOCK = 8  # tiles that are inverted one after the other; larger blocks are joined
_JOINED, _DEPTH = 64, 16  # tiles of the products that join two blocks
_WARPS = 4
_TILES = {"TILE": _TILE, "num_warps": 1}  # constants of an elimination

# Indices of addresses in the table.
_S = tl.constexpr(0)
_INVERSES = tl.constexpr(1)  # inverses of the diagonal tiles' factors
_OUT = tl.constexpr(2)
_ONLY = tl.constexpr(3)  # flags of the matrices that are wanted
_PLACES = 4


@triton.jit
def _note_kernel(places, S, inverses, out, only):
    """Write addresses into the table."""
    tl.store(places + _S, S.to(tl.int64))
    tl.store(places + _INVERSES, inverses.to(tl.int64))
    tl.store(places + _OUT, out.to(tl.int64))
    tl.store(places + _ONLY, only.to(tl.int64))


@triton.jit
def _find(places, PLACE: tl.constexpr):
    """Return the pointer to a float32 stack."""
    return tl.load(places + PLACE).to(tl.pointer_type(tl.float32))


@triton.jit
def _wanted(places, matrix):
    """True if a matrix is wanted."""
    return tl.load(tl.load(places + _ONLY).to(tl.pointer_type(tl.int8)) + matrix) != 0


@triton.jit
def _factors(D, least, DIRECT: tl.constexpr, HALF: tl.constexpr):
    """Return L⁻¹, and L if DIRECT, of D = L Lᵀ; not finite where a pivot is not positive.

    Pivots below ``least`` are replaced by it, and eliminate nothing: the elements below them are
    rounding errors, too, and would only grow.

    This is Gaussian elimination, from D | I to Lᵀ | L⁻¹, up to the square roots of the pivots.
    Column j of D is zero below the pivot from step j on, and column j of the right half is zero
    until then, so both share one column.
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
    return _exact_dot(A, Wt)


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
    """Move the tiles above the diagonal below it, transposed, and leave zeros above it."""
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
    """Write R⁻¹ of blocks along the diagonal, tile by tile. A program handles a row of tiles.

    Also write the zeros to the left.
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
    """Write R⁻¹ above B, where A and B are blocks along its diagonal, and C is R above B.

    The first launch stores T = C B, transposed, below A in R, which is no longer read. The SECOND
    computes -A T.
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
            within = k < width
            total += _exact_dot(
                tl.load(C + k[None, :], mask=within[None, :], other=0.0),
                tl.load(B + k[:, None] * n, mask=within[:, None] & wide, other=0.0),
            )
        tl.store(T + row[:, None], total, mask=wide)


def inverse_factor_(S: Tensor, least: float, only: Tensor, chain: Chain | None = None) -> Tensor:
    """Return R⁻¹ with Rᵀ R = S of a contiguous float32 stack (k, n, n), which is overwritten.

    Args:
        S: Symmetric matrices; upper tiles are not read.
        least: Smaller pivots are replaced by it; their rows of R are zero off the diagonal.
        only: bool (k,): matrices whose results are wanted; other results are undefined.
        chain: Launches factorisations that are repeated.

    Returns:
        R⁻¹, upper triangular, with NaN or infinity where a pivot was not positive.
    """
    k, n, _ = S.shape
    inverses = S.new_empty(k, -(-n // _TILE), _TILE, _TILE)
    out = torch.empty_like(S)
    chain = chain or Chain(S.device, graphs=False)
    launch(_note_kernel, (1,), chain.places, S, inverses, out, only)
    chain.replay(("R⁻¹", k, n, least), lambda: chain.invert(k, n, least))
    return out


def factor_(A: Tensor, chain: Chain | None = None) -> Tensor:
    """Overwrite a contiguous float32 stack (k, n, n) by its lower triangular factors, A = C Cᵀ.

    Args:
        A: Symmetric matrices; upper tiles are not read.
        chain: Launches factorisations that are repeated.

    Returns:
        bool (k,): True if all pivots were positive; else the factor is not usable.
    """
    k, n, _ = A.shape
    inverses = A.new_empty(k, -(-n // _TILE), _TILE, _TILE)
    chain = chain or Chain(A.device, graphs=False)
    all_matrices = _all_matrices(A)
    launch(_note_kernel, (1,), chain.places, A, inverses, A, all_matrices)
    chain.replay(("C", k, n), lambda: chain.factor(k, n))
    return (A.diagonal(dim1=-2, dim2=-1) > 0).all(-1)  # False for NaN


class Chain:
    """Launches the kernels of ``inverse_factor_`` and ``factor_``, which read a table of addresses.

    Args:
        device: Device of the matrices.
        graphs: True if the launches may be a CUDA graph.
    """

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self.places = torch.zeros(_PLACES, dtype=torch.int64, device=device)
        self.replay = Replay(device, graphs)

    @property
    def graph_refused(self) -> str | None:
        """Return why launches could not be captured as a graph; ``None`` if none was refused."""
        return self.replay.refused

    def _eliminate(self, k: int, n: int, least: float, direct: bool) -> int:
        tiles = -(-n // _TILE)
        for step in range(tiles):
            side = tiles - step if step else 1
            arguments = self.places, n, step, tiles, least
            flags = {"UPDATE": step > 0, "DIRECT": direct}
            launch(_step_kernel, (side, side, k), *arguments, **flags, **_TILES)
        return tiles

    def factor(self, k: int, n: int) -> None:
        """Launch the kernels for C of k matrices of order n, whose addresses have been noted."""
        tiles = self._eliminate(k, n, 0.0, direct=True)
        launch(_transpose_kernel, (tiles, tiles, k), self.places, n, **_TILES)

    def invert(self, k: int, n: int, least: float) -> None:
        """Launch the kernels for R⁻¹ of k matrices of order n, whose addresses have been noted."""
        tiles = self._eliminate(k, n, least, direct=False)
        blocks = {"BLOCK": _BLOCK, "TILE": _TILE, "num_warps": _WARPS}
        launch(_blocks_kernel, (tiles, k), self.places, n, tiles, **blocks)
        size = _BLOCK * _TILE
        while size < n:
            pairs = -(-(n - size) // (2 * size))
            grid = ((size // _JOINED) ** 2, pairs, k)
            for second in (False, True):
                constants = {"SECOND": second, "TILE": _JOINED, "DEPTH": _DEPTH}
                launch(_join_kernel, grid, self.places, n, size, **constants, num_warps=_WARPS)
            size *= 2


def whitened(
    X: Tensor, buffer: Tensor | None, least: float, limit: float, chain: Chain | None
) -> Split:
    """Return X R⁻¹; see ``linalg.backend``. Does not wait for the device.

    Only the device knows which matrices need a second pass. The pass is launched for all matrices,
    and programs without work end at once.
    """
    x = normalise_columns(X)
    w, largest = _inverse_of_gram(x, buffer, least, _all_matrices(X), chain)
    y = compose(x, w)
    del x, w
    again = largest > _bits(limit)
    # No least pivot here: columns no longer have length 1.
    w, _ = _inverse_of_gram(y, buffer, 0.0, again, chain)
    take_(y, compose(y, w, only=again), again)
    return y


def shifted(X: Tensor, buffer: Tensor | None, shift: float) -> Tensor:
    """Return X R⁻¹ with Rᵀ R = XᵀX + shift I; see ``linalg.backend``."""
    x = normalise_columns(X)
    w, _ = _inverse_of_gram(x, buffer, 0.0, _all_matrices(X), None, shift)
    return compose(x, w).float()


def _inverse_of_gram(
    x: Split,
    buffer: Tensor | None,
    least: float,
    only: Tensor,
    chain: Chain | None,
    shift: float = 0.0,
) -> tuple[Split, Tensor]:
    """Return R⁻¹ with Rᵀ R = XᵀX + shift I, and the bits of its largest elements."""
    S = multiply(x.mT, x, symmetric=True, out=buffer, only=only)
    if shift:
        S.diagonal(dim1=-2, dim2=-1).add_(shift)
    return measured_split(inverse_factor_(S, least, only, chain), only)


def _all_matrices(X: Tensor) -> Tensor:
    """Return a mask that selects all matrices, so that one kernel variant serves both cases."""
    return torch.ones(len(X), dtype=torch.bool, device=X.device)


def _bits(value: float) -> int:
    """Return the bits of a positive float32; larger numbers, infinity and NaN have larger bits."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)
