"""Triangular factors, batched: R⁻¹ with Rᵀ R = S for Cholesky-QR, or C = Rᵀ itself.

R is inverted in blocks along its diagonal, and these are joined, two by two. All of that is a long
chain of short launches, so it is replayed as a CUDA graph. ``whitened`` is X R⁻¹ for Cholesky-QR.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.elimination import (
    AT_INVERSES,
    AT_OUT,
    AT_S,
    PLACES,
    exact_dot,
    find,
    note_kernel,
    step_kernel,
    transpose_kernel,
    wanted,
)
from kronbit.kernels.graphs import Replay
from kronbit.kernels.launch import launch
from kronbit.kernels.matmul import compose, multiply
from kronbit.kernels.split import Split, measured_split, normalise_columns, take_

_TILE = 32
_BLOCK = 8  # tiles that are inverted one after the other; larger blocks are joined
_JOINED, _DEPTH = 64, 16  # tiles of the products that join two blocks
_WARPS = 4
_TILES = {"TILE": _TILE, "num_warps": 1}  # constants of an elimination


@triton.jit(do_not_specialize=["n", "tiles"])
def _blocks_kernel(places, n, tiles, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Write R⁻¹ of blocks along the diagonal, tile by tile. A program handles a row of tiles.

    Also write the zeros to the left.
    """
    matrix = tl.program_id(1).to(tl.int64)
    if not wanted(places, matrix):
        return
    i = tl.program_id(0)
    index = tl.arange(0, TILE)
    row = i * TILE + index
    R = find(places, AT_S) + matrix * n * n
    out = find(places, AT_OUT) + matrix * n * n
    inverses = find(places, AT_INVERSES) + matrix * tiles * TILE * TILE
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
            total -= exact_dot(
                tl.load(left, mask=(row < n)[:, None], other=0.0),
                tl.load(right, mask=(column < n)[None, :], other=0.0),
            )
        total = exact_dot(total, tl.trans(tl.load(inverses + k * TILE * TILE)))
        tl.store(out + row[:, None] * n + column[None, :], total, mask=inside)
        tl.debug_barrier()  # the next tiles read what this program has just written


@triton.jit(do_not_specialize=["n", "size"])
def _join_kernel(places, n, size, SECOND: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Write R⁻¹ above B, where A and B are blocks along its diagonal, and C is R above B.

    First compute T = C B, stored transposed below A in R, where nothing is read any more; then
    -A T.
    """
    matrix = tl.program_id(2).to(tl.int64)
    if not wanted(places, matrix):
        return
    R = find(places, AT_S) + matrix * n * n
    out = find(places, AT_OUT) + matrix * n * n
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
            total -= exact_dot(tl.load(A + k[None, :]), tl.load(T + k[:, None], mask=wide))
        place = out + (first + row)[:, None] * n + (second + column)[None, :]
        tl.store(place, total, mask=wide)
    else:
        C = R + (first + row)[:, None] * n + second
        B = out + second * n + second + column[None, :]
        for start in range(0, tl.minimum(j + TILE, width), DEPTH):  # and so is B
            k = start + tl.arange(0, DEPTH)
            within = k < width
            total += exact_dot(
                tl.load(C + k[None, :], mask=within[None, :], other=0.0),
                tl.load(B + k[:, None] * n, mask=within[:, None] & wide, other=0.0),
            )
        tl.store(T + row[:, None], total, mask=wide)


def inverse_factor_(S: Tensor, least: float, only: Tensor, chain: Chain | None = None) -> Tensor:
    """Return R⁻¹ with Rᵀ R = S of a contiguous float32 stack (k, n, n), which is overwritten.

    Args:
        S: Symmetric matrices; upper tiles are not read.
        least: Smaller pivots are replaced by it; their rows of R are zero off the diagonal.
        only: bool (k,): matrices whose results are wanted; others are undefined.
        chain: Launches factorisations that are repeated.

    Returns:
        R⁻¹, upper triangular, with NaN or infinity where a pivot was not positive.
    """
    k, n, _ = S.shape
    inverses = S.new_empty(k, -(-n // _TILE), _TILE, _TILE)
    out = torch.empty_like(S)
    chain = chain or Chain(S.device, graphs=False)
    launch(note_kernel, (1,), chain.places, S, inverses, out, only)
    chain.invert(k, n, least)
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
    launch(note_kernel, (1,), chain.places, A, inverses, A, all_matrices)
    chain.factor(k, n)
    return (A.diagonal(dim1=-2, dim2=-1) > 0).all(-1)  # False for NaN


class Chain:
    """Launches of ``inverse_factor_`` and ``factor_``. Kernels read addresses from a table.

    Args:
        device: Device of the matrices.
        graphs: True if the launches may be a CUDA graph.
    """

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self.places = torch.zeros(PLACES, dtype=torch.int64, device=device)
        self._replay = Replay(device, graphs)

    @property
    def graph_refused(self) -> str | None:
        """Return why the launches could not be captured; ``None`` if nothing was refused."""
        return self._replay.refused

    def invert(self, k: int, n: int, least: float) -> None:
        """Compute R⁻¹ of k matrices of order n, whose addresses have been noted."""
        self._replay(("R⁻¹", k, n, least), lambda: self._invert(k, n, least))

    def factor(self, k: int, n: int) -> None:
        """Compute C of k matrices of order n, whose addresses have been noted."""
        self._replay(("C", k, n), lambda: self._factor(k, n))

    def _eliminate(self, k: int, n: int, least: float, direct: bool) -> int:
        tiles = -(-n // _TILE)
        for step in range(tiles):
            left = tiles - step if step else 1
            arguments = self.places, n, step, tiles, least
            flags = {"UPDATE": step > 0, "DIRECT": direct}
            launch(step_kernel, (left, left, k), *arguments, **flags, **_TILES)
        return tiles

    def _factor(self, k: int, n: int) -> None:
        tiles = self._eliminate(k, n, 0.0, direct=True)
        launch(transpose_kernel, (tiles, tiles, k), self.places, n, **_TILES)

    def _invert(self, k: int, n: int, least: float) -> None:
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
    X: Tensor, room: Tensor | None, least: float, limit: float, chain: Chain | None
) -> Split:
    """Return X R⁻¹; see ``linalg.backend``. Does not wait for the device.

    Only the device knows which matrices need a second pass: it is launched for all of them, and
    programs without work end at once.
    """
    x = normalise_columns(X)
    all_matrices = _all_matrices(X)
    S = multiply(x.mT, x, symmetric=True, out=room, only=all_matrices)
    W = inverse_factor_(S, least, all_matrices, chain)
    w, largest = measured_split(W, all_matrices)
    del S, W
    y = compose(x, w)
    del x, w
    again = largest > _bits(limit)
    S = multiply(y.mT, y, symmetric=True, out=room, only=again)
    # No least pivot here: columns no longer have length 1.
    W = inverse_factor_(S, 0.0, again, chain)
    w, _ = measured_split(W, again)
    del S, W
    take_(y, compose(y, w, only=again), again)
    return y


def shifted(X: Tensor, room: Tensor | None, shift: float) -> Tensor:
    """Return X R⁻¹ with Rᵀ R = XᵀX + shift I; see ``linalg.backend``."""
    x = normalise_columns(X)
    all_matrices = _all_matrices(X)
    S = multiply(x.mT, x, symmetric=True, out=room, only=all_matrices)
    S.diagonal(dim1=-2, dim2=-1).add_(shift)
    w, _ = measured_split(inverse_factor_(S, 0.0, all_matrices), all_matrices)
    return compose(x, w).float()


def _all_matrices(X: Tensor) -> Tensor:
    """Return a mask that selects all matrices, so that one kernel variant serves both cases."""
    return torch.ones(len(X), dtype=torch.bool, device=X.device)


def _bits(value: float) -> int:
    """Return the bits of a positive float32; larger numbers, infinity and NaN have larger bits."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)
