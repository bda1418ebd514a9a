"""Matrix products at float32 accuracy on the tensor cores.

A float32 number, scaled by a power of two, is the sum of two float16 numbers to 22 bits. The
product of two such sums is three float16 products, accumulated in float32 (the fourth is below
float32's rounding): as accurate as a float32 product, at a third of the tensor cores' speed
instead of a fifteenth. One scale per matrix keeps the parts inside of float16's range: elements
that are 2⁻²⁷ of the largest still have their 22 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch

_PAD = 64  # operands are padded with zeros to multiples of it: loads need no masks
_ROWS = 8  # of a matrix, per program of a split
_TILE, _DEPTH, _WARPS, _STAGES = 128, 64, 8, 3
_SUPER = 8  # tiles whose rows stay in the cache together


class Split(NamedTuple):
    """Matrices (k, rows, columns) as hi + lo = x 2¹² / unit; zero-padded; maybe transposed."""

    hi: Tensor
    lo: Tensor
    unit: Tensor
    rows: int
    columns: int

    @property
    def mT(self) -> Split:
        """The transposed matrices, without a copy."""
        return Split(self.hi.mT, self.lo.mT, self.unit, self.columns, self.rows)


@triton.jit(do_not_specialize=["rows", "columns", "matrix_stride", "row_stride"])
def _largest_kernel(x, largest, rows, columns, matrix_stride, row_stride, ROWS: tl.constexpr):
    """The largest magnitude of a matrix, as the bits of a float32 (which sort as integers do)."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = tl.zeros((ROWS, 256), dtype=tl.int32)
    for start in range(0, columns, 256):
        column = start + tl.arange(0, 256)[None, :]
        place = x + matrix * matrix_stride + row * row_stride + column
        value = tl.load(place, mask=(row < rows) & (column < columns), other=0.0)
        seen = tl.maximum(seen, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(largest + matrix, tl.max(seen))


@triton.jit(
    do_not_specialize=[
        "rows",
        "columns",
        "padded_rows",
        "padded_columns",
        "matrix_stride",
        "row_stride",
    ]
)
def _split_kernel(
    x,
    largest,
    hi,
    lo,
    unit,
    rows,
    columns,
    padded_rows,
    padded_columns,
    matrix_stride,
    row_stride,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    power = 1.0
    if not BOUNDED:  # the power of two at or below the largest element: its exponent bits
        power = (tl.load(largest + matrix) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 1e-32)
    tl.store(unit + matrix, power / 4096.0, mask=tl.program_id(0) == 0)
    for start in range(0, padded_columns, 256):
        column = start + tl.arange(0, 256)[None, :]
        place = x + matrix * matrix_stride + row * row_stride + column
        value = tl.load(place, mask=(row < rows) & (column < columns), other=0.0)
        value = value * (4096.0 / power)
        high = value.to(tl.float16)
        inside = (row < padded_rows) & (column < padded_columns)
        target = (matrix * padded_rows + row) * padded_columns + column
        tl.store(hi + target, high, mask=inside)
        tl.store(lo + target, (value - high.to(tl.float32)).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["m", "n", "padded_m", "padded_n", "depth"])
def _product_kernel(
    a_hi,
    a_lo,
    a_unit,
    b_hi,
    b_lo,
    b_unit,
    c,
    out,
    m,
    n,
    padded_m,
    padded_n,
    depth,
    alpha,
    beta,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SUPER: tl.constexpr,
    PAD: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(m, TILE), tl.cdiv(n, TILE)
    first = tl.program_id(0) // (SUPER * tiles_n) * SUPER
    height = tl.minimum(tiles_m - first, SUPER)
    i = first + tl.program_id(0) % (SUPER * tiles_n) % height
    j = tl.program_id(0) % (SUPER * tiles_n) // height
    if SYMMETRIC and j > i:
        return
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    # Rows beyond the padding wrap around: what they give is never stored.
    a_line = tl.max_contiguous(tl.multiple_of(row % padded_m, PAD), PAD)
    b_line = tl.max_contiguous(tl.multiple_of(column % padded_n, PAD), PAD)
    # They are multiples of PAD; so written, the compiler knows, too.
    padded_m, padded_n = padded_m // PAD * PAD, padded_n // PAD * PAD
    depth = depth // PAD * PAD
    a_place, a_step = a_line[:, None] * depth + k[None, :], DEPTH
    if A_TRANSPOSED:
        a_place, a_step = a_line[:, None] + k[None, :] * padded_m, DEPTH * padded_m
    b_place, b_step = k[:, None] * padded_n + b_line[None, :], DEPTH * padded_n
    if B_TRANSPOSED:
        b_place, b_step = k[:, None] + b_line[None, :] * depth, DEPTH
    a_place += matrix * padded_m * depth
    b_place += matrix * padded_n * depth
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, depth, DEPTH):
        ah, al = tl.load(a_hi + a_place), tl.load(a_lo + a_place)
        bh, bl = tl.load(b_hi + b_place), tl.load(b_lo + b_place)
        # Tensor cores cut sums off where float32 rounds: they add up few terms at a time.
        part = tl.dot(al, bh)
        part = tl.dot(ah, bl, part)
        total += tl.dot(ah, bh, part)
        a_place += a_step
        b_place += b_step
    total = total * (alpha * tl.load(a_unit + matrix)) * tl.load(b_unit + matrix)
    inside = (row < m)[:, None] & (column < n)[None, :]
    place = matrix * m * n + row[:, None] * n + column[None, :]
    if ADD:
        total += beta * tl.load(c + place, mask=inside, other=0.0)
    tl.store(out + place, total, mask=inside)
    if SYMMETRIC and i != j:
        mirrored = (column < n)[:, None] & (row < m)[None, :]
        place = matrix * m * n + column[:, None] * n + row[None, :]
        tl.store(out + place, tl.trans(total), mask=mirrored)


def split(X: Tensor, bounded: bool = False) -> Split:
    """Two float16 parts of each matrix of a stack (k, rows, columns) of float32.

    Args:
        X: The stack.
        bounded: The largest elements are taken to be about 1 (up to 15 will do).
    """
    if X.stride(-1) != 1 and X.stride(-2) == 1:
        return split(X.mT, bounded).mT
    X = X if X.stride(-1) == 1 else X.contiguous()
    k, rows, columns = X.shape
    shape = (k, -(-rows // _PAD) * _PAD, -(-columns // _PAD) * _PAD)
    hi, lo = (torch.empty(shape, dtype=torch.float16, device=X.device) for _ in range(2))
    unit = torch.empty(k, dtype=torch.float32, device=X.device)
    grid = (triton.cdiv(shape[1], _ROWS), k)
    largest = unit
    if not bounded:
        largest = torch.zeros(k, dtype=torch.int32, device=X.device)
        launch(_largest_kernel, grid, X, largest, rows, columns, *X.stride()[:2], ROWS=_ROWS)
    launch(
        _split_kernel,
        grid,
        X,
        largest,
        hi,
        lo,
        unit,
        rows,
        columns,
        *shape[1:],
        *X.stride()[:2],
        BOUNDED=bounded,
        ROWS=_ROWS,
    )
    return Split(hi, lo, unit, rows, columns)


def multiply(
    A: Split,
    B: Split,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply and add as ``kronbit.products.multiply`` does, on operands that have been split."""
    k, m, n = len(A.hi), A.rows, B.columns
    C = None if C is None else C.contiguous()
    if out is None:
        out = torch.empty(k, m, n, dtype=torch.float32, device=A.hi.device)
    launch(
        _product_kernel,
        (triton.cdiv(m, _TILE) * triton.cdiv(n, _TILE), k),
        *A[:3],
        *B[:3],
        out if C is None else C,
        out,
        m,
        n,
        A.hi.shape[-2],
        B.hi.shape[-1],
        A.hi.shape[-1],
        float(alpha),
        float(beta),
        A_TRANSPOSED=A.hi.stride(-1) != 1,
        B_TRANSPOSED=B.hi.stride(-1) != 1,
        ADD=C is not None,
        SYMMETRIC=symmetric,
        TILE=_TILE,
        DEPTH=_DEPTH,
        SUPER=_SUPER,
        PAD=_PAD,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
