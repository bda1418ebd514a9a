"""Matrices as sums of two float16 matrices, which the tensor cores multiply: 22 bits.

One scale per matrix, a power of two, keeps the parts inside float16's range. Elements down to 2⁻¹⁴
of the largest have all their bits; smaller ones have an error of 2⁻³⁷ of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch

PAD = 64  # sides of operands are zero-padded to multiples of PAD, so loads need no masks
_ROWS = 8  # rows of a matrix, per program
_TAKEN = 4096  # elements of a matrix, per program that copies
_COLUMNS = 32  # columns of a matrix, per program that reads it by columns
_ONE, _GIVEN, _DIVISOR = 0, 1, 2  # kinds of bounds of the largest elements
UNIT = 2.0**-12  # unit of matrices whose largest elements are about 1
_SIZES = ["rows", "columns", "padded_rows", "padded_columns"]


class Split(NamedTuple):
    """Matrices (k, rows, columns) as hi + lo = x / unit; zero-padded; maybe transposed."""

    hi: Tensor
    lo: Tensor
    unit: Tensor
    rows: int
    columns: int

    @property
    def mT(self) -> Split:
        """The transposed matrices, without a copy."""
        return Split(self.hi.mT, self.lo.mT, self.unit, self.columns, self.rows)

    @property
    def transposed(self) -> bool:
        """True if the parts are stored by columns."""
        return self.hi.stride(-1) != 1

    def float(self) -> Tensor:
        """Return the matrices in float32."""
        whole = self.hi.float().add_(self.lo).mul_(self.unit[:, None, None])
        return whole[:, : self.rows, : self.columns]


def padded(size: int) -> int:
    """Return the size of a side with its padding."""
    return -(-size // PAD) * PAD


def empty_split(shape: Sequence[int], device: torch.device) -> Split:
    """Allocate matrices (k, rows, columns)."""
    k, rows, columns = shape
    sides = k, padded(rows), padded(columns)
    hi, lo = (torch.empty(sides, dtype=torch.float16, device=device) for _ in range(2))
    unit = torch.empty(k, dtype=torch.float32, device=device)
    return Split(hi, lo, unit, rows, columns)


@triton.jit
def power_below(bound):
    """Return the power of two at or below a positive float32: its exponent bits."""
    power = (bound.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(power, 1e-32)


@triton.jit
def magnitude_bits(value):
    """Return magnitudes of float32 numbers as integers in the same order; NaN is the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_parts(hi, lo, place, mask):
    """Load a value divided by its unit, in float32."""
    value = tl.load(hi + place, mask=mask, other=0.0).to(tl.float32)
    return value + tl.load(lo + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_parts(hi, lo, place, value, mask):
    """Store a float32 value that has been divided by its unit."""
    high = value.to(tl.float16)
    tl.store(hi + place, high, mask=mask)
    tl.store(lo + place, (value - high.to(tl.float32)).to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "matrix_stride", "row_stride"])
def _largest_kernel(
    x, largest, only, rows, columns, matrix_stride, row_stride, MASKED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Find the largest magnitude of a matrix, as the bits of a float32."""
    matrix = tl.program_id(1).to(tl.int64)
    if MASKED and tl.load(only + matrix) == 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = tl.zeros((ROWS, 256), dtype=tl.int32)
    for start in range(0, columns, 256):
        column = start + tl.arange(0, 256)[None, :]
        place = x + matrix * matrix_stride + row * row_stride + column
        value = tl.load(place, mask=(row < rows) & (column < columns), other=0.0)
        seen = tl.maximum(seen, magnitude_bits(value))
    tl.atomic_max(largest + matrix, tl.max(seen))


@triton.jit(do_not_specialize=[*_SIZES, "matrix_stride", "row_stride"])
def _split_kernel(
    x, bound, only, hi, lo, unit, rows, columns, padded_rows, padded_columns, matrix_stride,
    row_stride, BOUND: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    if MASKED and tl.load(only + matrix) == 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    power = power_below(tl.load(bound + matrix)) if BOUND == 1 else 1.0
    divisor = tl.load(bound + matrix) if BOUND == 2 else 1.0
    if BOUND != 2:
        tl.store(unit + matrix, power / 4096.0, mask=tl.program_id(0) == 0)
    for start in range(0, padded_columns, 256):
        column = start + tl.arange(0, 256)[None, :]
        place = x + matrix * matrix_stride + row * row_stride + column
        value = tl.load(place, mask=(row < rows) & (column < columns), other=0.0)
        inside = (row < padded_rows) & (column < padded_columns)
        target = (matrix * padded_rows + row) * padded_columns + column
        store_parts(hi, lo, target, value * (1.0 / divisor) * (4096.0 / power), inside)


@triton.jit(do_not_specialize=["rows", "padded_rows", "padded_columns"])
def _scale_kernel(
    hi, lo, unit, factors, bound, out_hi, out_lo, out_unit, rows, padded_rows, padded_columns,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply rows by factors."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    power = power_below(tl.load(bound + matrix))
    tl.store(out_unit + matrix, power / 4096.0, mask=tl.program_id(0) == 0)
    factor = tl.load(factors + matrix * rows + row, mask=row < rows, other=0.0)
    factor *= tl.load(unit + matrix) * (4096.0 / power)
    for start in range(0, padded_columns, 256):
        column = start + tl.arange(0, 256)[None, :]
        inside = (row < padded_rows) & (column < padded_columns)
        place = (matrix * padded_rows + row) * padded_columns + column
        value = load_parts(hi, lo, place, inside)
        store_parts(out_hi, out_lo, place, value * factor, inside)


@triton.jit(do_not_specialize=_SIZES)
def _normalise_kernel(
    x, hi, lo, unit, rows, columns, padded_rows, padded_columns, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Divide columns by their lengths; zero stays zero."""
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x += matrix * rows * columns
    squares = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < columns)
        value = tl.load(x + row * columns + column, mask=mask, other=0.0)
        squares += value * value
    length = tl.sqrt(tl.sum(squares, axis=0))[None, :]
    factor = 4096.0 / tl.where(length == 0.0, 1.0, length)
    for start in range(0, padded_rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < columns)
        value = tl.load(x + row * columns + column, mask=mask, other=0.0)
        inside = (row < padded_rows) & (column < padded_columns)
        place = (matrix * padded_rows + row) * padded_columns + column
        store_parts(hi, lo, place, value * factor, inside)
    tl.store(unit + matrix, 1.0 / 4096.0, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["size"])
def _take_kernel(hi, lo, unit, new_hi, new_lo, new_unit, only, size, BLOCK: tl.constexpr):
    """Copy a matrix in two parts, if it is wanted."""
    matrix = tl.program_id(1).to(tl.int64)
    if tl.load(only + matrix) == 0:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, place = place < size, matrix * size + place
    tl.store(hi + place, tl.load(new_hi + place, mask=mask), mask=mask)
    tl.store(lo + place, tl.load(new_lo + place, mask=mask), mask=mask)
    tl.store(unit + matrix, tl.load(new_unit + matrix), mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["rows", "columns"])
def _dots_kernel(x, y, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute dot products of columns."""
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < columns)[None, :]
        place = matrix * rows * columns + row * columns + column[None, :]
        total += tl.load(x + place, mask=mask, other=0.0) * tl.load(y + place, mask=mask, other=0.0)
    tl.store(out + matrix * columns + column, tl.sum(total, axis=0), mask=column < columns)


def split(X: Tensor, bound: Tensor | float | None = None) -> Split:
    """Split each matrix of a float32 stack (k, rows, columns); see ``linalg.products.operand``.

    Elements up to 15 times the power of two below the bound do not overflow.
    """
    if X.stride(-1) != 1 and X.stride(-2) == 1:
        return split(X.mT, bound).mT
    X = X if X.stride(-1) == 1 else X.contiguous()
    if bound is None:
        return measured_split(X)[0]
    if isinstance(bound, Tensor):
        return _split(X, bound)
    assert bound == 1, "other bounds are tensors with a number per matrix"
    return _split(X)


def measured_split(X: Tensor, only: Tensor | None = None) -> tuple[Split, Tensor]:
    """Split a stack that is stored by rows. Also return the largest magnitudes as float32 bits.

    ``only``, bool (k,), marks the matrices that are wanted; other results are undefined.
    """
    k, rows, columns = X.shape
    largest = torch.zeros(k, dtype=torch.int32, device=X.device)
    tensors, sizes = (X, largest, largest if only is None else only), (rows, columns)
    constants = {"MASKED": only is not None, "ROWS": _ROWS}
    launch(_largest_kernel, (-(-rows // _ROWS), k), *tensors, *sizes, *X.stride()[:2], **constants)
    return _split(X, largest.view(torch.float32), only), largest


def _split(X: Tensor, bound: Tensor | None = None, only: Tensor | None = None) -> Split:
    out = empty_split(X.shape, X.device)
    _launch_split(X, bound, only, out[:3], _ONE if bound is None else _GIVEN)
    return out


def split_quotients(X: Tensor, divisors: Tensor, parts: Tensor) -> None:
    """Write parts (2, k, rows, columns), padded, of matrices divided by powers of two, (k,).

    No element may be much larger than its divisor. The unit of the parts is ``UNIT``.
    """
    _launch_split(X, divisors, None, (*parts, X), _DIVISOR)


def _launch_split(
    X: Tensor, bound: Tensor | None, only: Tensor | None, out: tuple[Tensor, ...], kind: int
) -> None:
    sides = out[0].shape[1:]
    tensors = X, X if bound is None else bound, X if only is None else only, *out
    constants = {"BOUND": kind, "MASKED": only is not None, "ROWS": _ROWS}
    numbers = *X.shape[1:], *sides, *X.stride()[:2]
    launch(_split_kernel, (-(-sides[0] // _ROWS), len(X)), *tensors, *numbers, **constants)


def scale_rows(X: Split, factors: Tensor, largest: Tensor) -> Split:
    """Return diag(factors) X for non-negative factors (k, rows), and a nearly orthogonal X."""
    out = empty_split((len(X.hi), X.rows, X.columns), X.hi.device)
    sides = X.hi.shape[1:]
    tensors = *X[:3], factors.contiguous(), largest, *out[:3]
    launch(_scale_kernel, (-(-sides[0] // _ROWS), len(X.hi)), *tensors, X.rows, *sides, ROWS=_ROWS)
    return out


def normalise_columns(X: Tensor) -> Split:
    """Divide the columns of a contiguous stack by their lengths; zero stays zero."""
    out = empty_split(X.shape, X.device)
    sizes = *X.shape[1:], *out.hi.shape[1:]
    grid = -(-sizes[3] // _COLUMNS), len(X)
    launch(_normalise_kernel, grid, X, *out[:3], *sizes, ROWS=32, COLUMNS=_COLUMNS)
    return out


def take_(x: Split, new: Split, only: Tensor) -> None:
    """Overwrite matrices by those of ``new`` where ``only``, bool (k,), is True."""
    size = math.prod(x.hi.shape[1:])
    grid = (-(-size // _TAKEN), len(x.hi))
    launch(_take_kernel, grid, *x[:3], *new[:3], only, size, BLOCK=_TAKEN)


def column_dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return dot products of the columns of two contiguous stacks (k, rows, columns)."""
    k, rows, columns = X.shape
    out = torch.empty(k, columns, dtype=torch.float32, device=X.device)
    grid = (-(-columns // _COLUMNS), k)
    launch(_dots_kernel, grid, X, Y, out, rows, columns, ROWS=32, COLUMNS=_COLUMNS)
    return out
