"""Norms and largest eigenvalues of matrices.

Sums run in an order that depends neither on the batch nor on padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.guard import processors
from kronbit.kernels.launch import launch
from kronbit.kernels.task_queue import take, tell, wait_for

_ROWS = 8  # rows of a matrix, per program
_ROWS_AT_ONCE = 16  # rows that are multiplied by a vector at once
_COLUMNS = 256
_PARTS = 128  # parts of a sum that are added at once
_PER_PROCESSOR = 8  # programs that wait for memory side by side


@triton.jit(do_not_specialize=["n"])
def _squares_kernel(a, out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum up the squares of a program's rows in float64: float32 would overflow."""
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
def _root_of_sum_kernel(a, norms, powers, parts, PARTS: tl.constexpr, LEAST: tl.constexpr):
    """Compute the root of a sum of squares, and the next power of two."""
    matrix = tl.program_id(0)
    total = tl.zeros((PARTS,), dtype=tl.float64)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(a + matrix * parts + part, mask=part < parts, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    tl.store(norms + matrix, norm.to(tl.float32))
    norm = tl.where(norm == 0.0, 1.0, norm)
    # Read the exponent's bits; a power that is too large becomes infinity.
    exponent = ((norm.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    bits = tl.minimum(tl.maximum(exponent, LEAST) + 127, 255).to(tl.int32) << 23
    tl.store(powers + matrix, bits.to(tl.float32, bitcast=True))


@triton.jit
def _length(x, n, COLUMNS: tl.constexpr):
    """Return the length of a vector; 1 for zero."""
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, n, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        value = tl.load(x + place, mask=place < n, other=0.0)
        total += value * value
    length = tl.sqrt(tl.sum(total))
    return tl.where(length == 0.0, 1.0, length)


@triton.jit
def _place_of_largest(a, n, COLUMNS: tl.constexpr):
    """Return the first index of the largest diagonal element; n if all are NaN."""
    best = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    at = tl.full((COLUMNS,), 0, dtype=tl.int32) + n
    for start in range(0, n, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        value = tl.load(a + place.to(tl.int64) * (n + 1), mask=place < n, other=float("-inf"))
        at = tl.where(value > best, place, at)
        best = tl.maximum(best, value)
    return tl.min(tl.where(best == tl.max(best), at, n))


@triton.jit(do_not_specialize=["k", "n", "products", "unscaled"])
def _iteration_kernel(
    a, factors, x, done, k, n, products, unscaled,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute x ← A x times the matrix's factor; normalise x every ``unscaled`` steps."""
    parts = tl.cdiv(n, ROWS)
    taken = done + k
    task = take(taken)
    while task < products * k * parts:
        step = task // (k * parts)
        matrix = (task % (k * parts) // parts).to(tl.int64)
        row = task % parts * ROWS + tl.arange(0, ROWS)
        wait_for(done + matrix, step * parts)
        old, new = x + (step % 2 * k + matrix) * n, x + ((step + 1) % 2 * k + matrix) * n
        length, length_of_old, one = 1.0, n, n
        if step == 0:
            length_of_old, one = 0, _place_of_largest(a + matrix * n * n, n, COLUMNS)
        elif step % unscaled == 0:
            length = _length(old, n, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, n, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = (row < n)[:, None] & (column < n)[None, :]
            place = a + matrix * n * n + row[:, None] * n + column[None, :]
            value = tl.load(old + column, mask=column < length_of_old, other=0.0) / length
            value = tl.where(column == one, 1.0, value)
            total += tl.load(place, mask=inside, other=0.0) * value[None, :]
        tl.store(new + row, tl.sum(total, axis=1) * tl.load(factors + matrix), mask=row < n)
        tell(done + matrix)
        task = take(taken)


@triton.jit(do_not_specialize=["n"])
def _quotient_kernel(x, out, n, COLUMNS: tl.constexpr):
    """Compute |x·y| / x·x of vectors x, which are stored before all y; zero for zero."""
    x += tl.program_id(0).to(tl.int64) * n
    y = x + tl.num_programs(0).to(tl.int64) * n
    length = _length(x, n, COLUMNS)
    dot, square = tl.zeros((COLUMNS,), dtype=tl.float32), tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, n, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        value = tl.load(x + place, mask=place < n, other=0.0) / length
        dot += value * tl.load(y + place, mask=place < n, other=0.0)
        square += value * value
    length = tl.sum(square)
    quotient = tl.abs(tl.sum(dot)) / tl.where(length == 0.0, 1.0, length)
    tl.store(out + tl.program_id(0), quotient)


@triton.jit(do_not_specialize=["n", "ridge", "least"])
def _ridge_kernel(
    a, largest, norms, powers, orders, n, ridge, least,
    MIXED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the ridge to the diagonal of a matrix."""
    matrix = tl.program_id(0)
    order = tl.load(orders + matrix) if MIXED else n
    norm = tl.load(norms + matrix)
    value = tl.load(largest + matrix) * tl.load(powers + matrix) * ridge
    value = tl.where(norm == 0.0, 1.0, tl.maximum(value, norm * least))
    a += matrix.to(tl.int64) * n * n
    for start in range(0, order, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        element, mask = a + place.to(tl.int64) * (n + 1), place < order
        tl.store(element, tl.load(element, mask=mask) + value, mask=mask)


def norms(A: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Return ‖A‖_F and the next power of two; see ``linalg.backend``."""
    k, n, _ = A.shape
    parts = torch.empty(k, -(-n // _ROWS), dtype=torch.float64, device=A.device)
    launch(_squares_kernel, (parts.shape[1], k), A, parts, n, ROWS=_ROWS, COLUMNS=_COLUMNS)
    norm, power = (torch.empty(k, dtype=torch.float32, device=A.device) for _ in range(2))
    constants = {"PARTS": _PARTS, "LEAST": least}
    launch(_root_of_sum_kernel, (k,), parts, norm, power, parts.shape[1], **constants)
    return norm, power


def power_iteration(A: Tensor, factors: Tensor, steps: int, unscaled: int) -> Tensor:
    """Return λmax of contiguous matrices times their factors; see ``linalg.backend``.

    The number of steps is even, and a multiple of ``unscaled``.
    """
    k, n, _ = A.shape
    x = torch.empty(2, k, n, dtype=torch.float32, device=A.device)
    counters = torch.zeros(k + 1, dtype=torch.int32, device=A.device)
    programs = _PER_PROCESSOR * processors(A.device)
    arguments = A, factors, x, counters, k, n, steps + 1, unscaled
    launch(_iteration_kernel, (programs,), *arguments, ROWS=_ROWS_AT_ONCE, COLUMNS=_COLUMNS)
    out = torch.empty(k, dtype=torch.float32, device=A.device)
    launch(_quotient_kernel, (k,), x, out, n, COLUMNS=_COLUMNS)
    return out


def add_ridge_(
    A: Tensor,
    largest: Tensor,
    norm: Tensor,
    s: Tensor,
    ridge: float,
    least: float,
    orders: Tensor | None = None,
) -> None:
    """Add a ridge to diagonals; see ``linalg.backend``."""
    k, n, _ = A.shape
    mixed = orders is not None
    arguments = A, largest, norm, s, orders if mixed else A, n, ridge, least
    launch(_ridge_kernel, (k,), *arguments, MIXED=mixed, COLUMNS=_COLUMNS)
