"""What is read off whole matrices, one pass each: norms, and products with a vector.

Sums are taken in an order that neither the batch nor zeros around a matrix change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch

_ROWS = 8  # of a matrix, per program
_COLUMNS = 256
_PARTS = 128  # that are added at once


@triton.jit(do_not_specialize=["n"])
def _squares_kernel(a, out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of squares of some rows, in float64: float32 would overflow."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = a + matrix * n * n + row * n + column
        value = tl.load(place, mask=(row < n) & (column < n), other=0.0).to(tl.float64)
        total += value * value
    tl.store(out + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(total))


@triton.jit(do_not_specialize=["parts"])
def _root_of_sum_kernel(a, out, parts, PARTS: tl.constexpr):
    matrix = tl.program_id(0)
    total = tl.zeros((PARTS,), dtype=tl.float64)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(a + matrix * parts + part, mask=part < parts, other=0.0)
    tl.store(out + matrix, tl.sqrt(tl.sum(total)))


@triton.jit(do_not_specialize=["n"])
def _vector_kernel(a, x, factors, out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows times a vector, times the matrix's factor."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < n)[:, None] & (column < n)[None, :]
        place = a + matrix * n * n + row[:, None] * n + column[None, :]
        value = tl.load(x + matrix * n + column, mask=column < n, other=0.0)
        total += tl.load(place, mask=inside, other=0.0) * value[None, :]
    result = tl.sum(total, axis=1) * tl.load(factors + matrix)
    tl.store(out + matrix * n + row, result, mask=row < n)


@triton.jit
def _dot(x, y, n, COLUMNS: tl.constexpr):
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, n, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        left = tl.load(x + place, mask=place < n, other=0.0)
        total += left * tl.load(y + place, mask=place < n, other=0.0)
    return tl.sum(total)


@triton.jit(do_not_specialize=["n"])
def _unit_kernel(x, n, COLUMNS: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * n
    length = tl.sqrt(_dot(x, x, n, COLUMNS))
    length = tl.where(length == 0.0, 1.0, length)
    for start in range(0, n, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        value = tl.load(x + place, mask=place < n, other=0.0)
        tl.store(x + place, value / length, mask=place < n)


@triton.jit(do_not_specialize=["n"])
def _quotient_kernel(x, y, out, n, COLUMNS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * n
    square = _dot(x + first, x + first, n, COLUMNS)
    square = tl.where(square == 0.0, 1.0, square)
    tl.store(out + tl.program_id(0), _dot(x + first, y + first, n, COLUMNS) / square)


def norms(A: Tensor) -> Tensor:
    """‖A‖_F of each matrix of a contiguous float32 stack (k, n, n); float64, (k,)."""
    k, n, _ = A.shape
    parts = torch.empty(k, -(-n // _ROWS), dtype=torch.float64, device=A.device)
    launch(_squares_kernel, (parts.shape[1], k), A, parts, n, ROWS=_ROWS, COLUMNS=_COLUMNS)
    out = torch.empty(k, dtype=torch.float64, device=A.device)
    launch(_root_of_sum_kernel, (k,), parts, out, parts.shape[1], PARTS=_PARTS)
    return out


def times_vector(A: Tensor, x: Tensor, factors: Tensor) -> Tensor:
    """Every matrix of a contiguous stack (k, n, n) times its vector (k, n, 1) and its factor."""
    k, n, _ = A.shape
    out = torch.empty_like(x)
    grid = (-(-n // _ROWS), k)
    launch(_vector_kernel, grid, A, x, factors, out, n, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return out


def make_unit_(x: Tensor) -> None:
    """Divide vectors (k, n, 1), contiguous, by their lengths; zero stays zero."""
    launch(_unit_kernel, (len(x),), x, x.shape[1], COLUMNS=_COLUMNS)


def quotients(x: Tensor, y: Tensor) -> Tensor:
    """x·y / x·x of vectors (k, n, 1), contiguous; (k,); zero for zero."""
    out = torch.empty(len(x), dtype=x.dtype, device=x.device)
    launch(_quotient_kernel, (len(x),), x, y, out, x.shape[1], COLUMNS=_COLUMNS)
    return out
