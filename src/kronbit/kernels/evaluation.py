"""Evaluation of a polynomial in two launches: all lines but the last; after a check, the last.

A line is one of the polynomial's products. Programs take tiles in the order of lines, matrices and
tiles, and wait until the previous lines of their matrix are done: no processor idles between lines.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.compact import tile_at
from kronbit.kernels.guard import processors
from kronbit.kernels.launch import launch
from kronbit.kernels.matmul import PRODUCT, accumulate, mirrored_tile, store_tile, tiles, wrapped
from kronbit.kernels.polynomial import Polynomial
from kronbit.kernels.split import UNIT, load_parts, magnitude_bits, padded, split_quotients
from kronbit.kernels.task_queue import take, tell, wait_for

# A line has places (out, A, B, C), which index ``parts``, and numbers (alpha times the units of A
# and B, beta, the unit of C, the diagonal, the inverse of the unit of out). Parts hold a matrix
# divided by its unit.
_WHERE = tl.constexpr(4)
_NUMBERS = tl.constexpr(5)
_ROWS, _COLUMNS = 8, 256  # rows and columns of a matrix, per program of the check
_PRODUCT = {name: value for name, value in PRODUCT.items() if name != "SUPER"}


@triton.jit
def _parts_of(parts, last, place, matrix, k, size, PLACES: tl.constexpr):
    """Return the larger parts of a matrix; the smaller parts follow the larger parts of all k."""
    first = last if place == PLACES - 1 else parts + place * 2 * k * size
    return first + matrix * size


@triton.jit(do_not_specialize=["k", "n", "padded_n", "first", "lines", "tolerance"])
def _evaluate_kernel(
    parts, out, places, numbers, orders, scale, done, k, n, padded_n, first, lines, tolerance,
    MIXED: tl.constexpr, LAST: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Compute lines of a polynomial from ``first`` on; or the last line alone, in float32."""
    # Counters: finished tiles of each matrix, its distance from I, and tiles already taken.
    taken, farthest = done + 2 * k, done + k
    last = out.to(tl.pointer_type(tl.float16), bitcast=True)
    padded_n = padded_n // PAD * PAD  # tell the compiler that it is a multiple of PAD
    size = padded_n.to(tl.int64) * padded_n
    lo = k * size  # after the larger parts
    side = tl.cdiv(n, TILE)
    most = side * (side + 1) // 2
    task = take(taken + LAST)
    while task < lines * k * most:
        line = task // (k * most)
        matrix = task % (k * most) // most
        i, j = tile_at(task % most)
        order = tl.load(orders + matrix) if MIXED else n
        at, by = places + (first + line) * _WHERE, numbers + (first + line) * _NUMBERS
        to, a, b, c = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        alpha, beta, unit_of_c = tl.load(by), tl.load(by + 1), tl.load(by + 2)
        diagonal, inverse_unit = tl.load(by + 3), tl.load(by + 4)
        height = tl.cdiv(order, TILE)
        if i < height:
            if not LAST:
                wait_for(done + matrix, line * (height * (height + 1) // 2))
            a_hi = _parts_of(parts, last, a, matrix, k, size, PLACES)
            b_hi = _parts_of(parts, last, b, matrix, k, size, PLACES)
            row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
            depth = tl.arange(0, DEPTH)
            a_line, b_line = wrapped(row, padded_n, PAD), wrapped(column, padded_n, PAD)
            value = accumulate(
                a_hi, a_hi + lo, a_line[:, None] * padded_n + depth[None, :], DEPTH,
                b_hi, b_hi + lo, depth[:, None] * padded_n + b_line[None, :], DEPTH * padded_n,
                tl.cdiv(order, PAD) * PAD, TILE, DEPTH,
            )  # fmt: skip
            value *= alpha
            if LAST:
                far = tl.load(farthest + matrix).to(tl.float32, bitcast=True)
                value *= tl.where(far < tolerance, tl.load(scale + matrix), float("nan"))
                if i == j:  # to the bit, as all other tiles are
                    value = mirrored_tile(value, row, column)
                result = out + matrix.to(tl.int64) * n * n
                inside = (row < order)[:, None] & (column < order)[None, :]
                tl.store(result + row[:, None] * n + column[None, :], value, mask=inside)
                if i != j:
                    inside = (column < order)[:, None] & (row < order)[None, :]
                    place = column[:, None] * n + row[None, :]
                    tl.store(result + place, tl.trans(value), mask=inside)
            else:
                if c >= 0:
                    c_hi = _parts_of(parts, last, c, matrix, k, size, PLACES)
                    within = (row < padded_n)[:, None] & (column < padded_n)[None, :]
                    place = row[:, None] * padded_n + column[None, :]
                    value += (beta * unit_of_c) * load_parts(c_hi, c_hi + lo, place, within)
                on = (row[:, None] == column[None, :]) & (row < order)[:, None]
                value += tl.where(on, diagonal, 0.0)
                if i == j:
                    value = mirrored_tile(value, row, column)
                value *= inverse_unit
                hi = _parts_of(parts, last, to, matrix, k, size, PLACES)
                store_tile(hi, hi + lo, row, column, padded_n, padded_n, value, True)
                if i != j:
                    flipped = tl.trans(value)
                    store_tile(hi, hi + lo, column, row, padded_n, padded_n, flipped, True)
                tell(done + matrix)
        task = take(taken + LAST)


@triton.jit(do_not_specialize=["k", "n", "padded_n", "line"])
def _check_kernel(
    parts, out, places, numbers, orders, done, k, n, padded_n, line,
    MIXED: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Measure the distance of a line's C from I, by the larger parts, as the bits of a float32."""
    matrix = tl.program_id(1)
    order = tl.load(orders + matrix) if MIXED else n
    place, unit = tl.load(places + line * _WHERE + 3), tl.load(numbers + line * _NUMBERS + 2)
    last = out.to(tl.pointer_type(tl.float16), bitcast=True)
    size = padded_n.to(tl.int64) * padded_n
    hi = _parts_of(parts, last, place, matrix, k, size, PLACES)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(0, order, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < order) & (column < order)
        value = tl.load(hi + row * padded_n + column, mask=inside, other=0.0).to(tl.float32) * unit
        value = tl.where(inside & (row == column), value - 1.0, value)
        seen = tl.maximum(seen, magnitude_bits(value))
    tl.atomic_max(done + k + matrix, tl.max(seen))


def evaluation_buffer(k: int, n: int, device: torch.device) -> Tensor:
    """Allocate matrices (k, n, n) in float32, with storage that also fits their parts."""
    whole = torch.empty(k * padded(n) ** 2, dtype=torch.float32, device=device)
    return whole[: k * n**2].view(k, n, n)


def evaluate(
    polynomial: Polynomial, A: Tensor, s: Tensor, scale: Tensor, orders: Tensor | None = None
) -> Tensor:
    """Evaluate a polynomial of A / s; see ``linalg.backend``."""
    k, n, _ = A.shape
    side = padded(n)
    count = 1 + max(map(max, _places(polynomial)))
    parts = torch.empty(count - 1, 2, k, side, side, dtype=torch.float16, device=A.device)
    split_quotients(A, s, parts[0])
    if A.storage_offset() != 0 or A.untyped_storage().nbytes() != 4 * k * side**2:
        A = evaluation_buffer(k, n, A.device)
    counters = torch.zeros(2 * k + 2, dtype=torch.int32, device=A.device)
    tables = *_tables(polynomial, A.device), counters if orders is None else orders
    programs = min(processors(A.device), k * tiles(n) * (tiles(n) + 1) // 2)
    before, constants = len(polynomial.products) - 1, {"PLACES": count, "MIXED": orders is not None}
    read, sizes = (parts, A, *tables), (counters, k, n, side)

    def products(first: int, lines: int, last: bool) -> None:
        arguments = *read, scale, *sizes, first, lines, polynomial.tolerance
        launch(_evaluate_kernel, (programs,), *arguments, LAST=last, **constants, **_PRODUCT)

    products(0, before, last=False)
    grid, line = (-(-n // _ROWS), k), polynomial.checked - 1
    launch(_check_kernel, grid, *read, *sizes, line, ROWS=_ROWS, COLUMNS=_COLUMNS, **constants)
    products(before, 1, last=True)
    return A


@cache
def _places(polynomial: Polynomial) -> tuple[tuple[int, ...], ...]:
    """Return the places (out, A, B, C) of the matrices of each line, as few as possible.

    No line overwrites its operands. The first matrix is in place 0, the result in the last place.
    """
    last_uses = polynomial.last_uses()
    last = len(polynomial.products)
    last_uses[polynomial.products[polynomial.checked - 1].C or 0] = last  # when it is checked
    at, free, count = {0: 0}, list[int](), 1
    lines = []
    for number, line in enumerate(polynomial.products, 1):
        chosen = max(free, default=0)
        if chosen == 0 and (not free or number == last):
            chosen = count
            count += 1
        else:
            free.remove(chosen)
        at[number] = chosen
        C = -1 if line.C is None else at[line.C]
        lines.append((chosen, at[line.A], at[line.B], C))
        free += [at[operand] for operand in line.operands() if last_uses[operand] == number]
    names = {chosen: count - 1, count - 1: chosen}
    return tuple(tuple(names.get(place, place) for place in line) for line in lines)


@lru_cache(maxsize=64)
def _tables(polynomial: Polynomial, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places and numbers of a polynomial's lines, as the kernel reads them."""
    units = [UNIT]
    numbers = []
    for line in polynomial.products:
        units.append(2.0 ** math.floor(math.log2(line.bound)) * UNIT)
        alpha = line.alpha * units[line.A] * units[line.B]
        unit_of_c = 0.0 if line.C is None else units[line.C]
        numbers.append((alpha, line.beta, unit_of_c, line.diagonal, 1 / units[-1]))
    return (
        torch.tensor(_places(polynomial), dtype=torch.int64, device=device),
        torch.tensor(numbers, dtype=torch.float32, device=device),
    )
