"""Matrix products at float32 accuracy on the tensor cores, at a third of their speed.

The product of two sums of float16 numbers (``kernels.split``) is three float16 products,
accumulated in float32; the fourth is below float32's rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch
from kronbit.kernels.split import PAD, Split, empty_split, load_parts, power_below, store_parts

# Side of a tile of the result, depth of a product, and tiles whose rows stay in the cache.
PRODUCT = {"TILE": 128, "DEPTH": 64, "SUPER": 8, "PAD": PAD, "num_warps": 8, "num_stages": 3}

# Kinds of C and of the result.
_NOTHING, _FLOATS, _PARTS = 0, 1, 2


@triton.jit
def place_of_tile(m, n, TILE: tl.constexpr, SUPER: tl.constexpr):
    """Return the program's tile of an m x n matrix. Neighbouring programs share operands."""
    tiles_m, tiles_n = tl.cdiv(m, TILE), tl.cdiv(n, TILE)
    first = tl.program_id(0) // (SUPER * tiles_n) * SUPER
    height = tl.minimum(tiles_m - first, SUPER)
    i = first + tl.program_id(0) % (SUPER * tiles_n) % height
    return i, tl.program_id(0) % (SUPER * tiles_n) // height


@triton.jit
def wrapped(index, size, PAD: tl.constexpr):
    """Wrap indices beyond the padding around. Results at these indices are never stored."""
    return tl.max_contiguous(tl.multiple_of(index % size, PAD), PAD)


@triton.jit
def mirrored_tile(value, row, column):
    """Mirror the lower triangle of a tile on the diagonal, so that the result is symmetric."""
    return tl.where(row[:, None] >= column[None, :], value, tl.trans(value))


@triton.jit
def store_tile(out, out_lo, row, column, rows, columns, value, PARTS: tl.constexpr):
    """Store a tile of a contiguous matrix (rows, columns), in float32 or in two parts."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    if PARTS:
        store_parts(out, out_lo, place, value, mask)
    else:
        tl.store(out + place, value, mask=mask)


@triton.jit
def accumulate(
    a_hi, a_lo, a_place, a_step, b_hi, b_lo, b_place, b_step, depth, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Sum up products along the depth; ``step`` is the stride to the next operands."""
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, depth, DEPTH):
        ah, al = tl.load(a_hi + a_place), tl.load(a_lo + a_place)
        bh, bl = tl.load(b_hi + b_place), tl.load(b_lo + b_place)
        # Tensor cores truncate sums where float32 rounds, so they add only a few terms at a time.
        part = tl.dot(al, bh)
        part = tl.dot(ah, bl, part)
        total += tl.dot(ah, bh, part)
        a_place += a_step
        b_place += b_step
    return total


@triton.jit(do_not_specialize=["m", "n", "padded_m", "padded_n", "depth"])
def _product_kernel(
    a_hi, a_lo, a_unit, b_hi, b_lo, b_unit, c, c_lo, c_unit, out, out_lo, out_unit, bound, only, m,
    n, padded_m, padded_n, depth, alpha, beta,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr,
    BOUNDED: tl.constexpr, SYMMETRIC: tl.constexpr, TRIANGULAR: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, SUPER: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    if MASKED and tl.load(only + matrix) == 0:
        return
    i, j = place_of_tile(m, n, TILE, SUPER)
    if SYMMETRIC and j > i:
        return
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    a_line, b_line = wrapped(row, padded_m, PAD), wrapped(column, padded_n, PAD)
    # Tell the compiler that both are multiples of PAD.
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
    if TRIANGULAR:  # beyond this depth, A or B is zero
        depth = tl.minimum(depth, tl.minimum(i + 1, j + 1) * TILE)
    total = accumulate(a_hi, a_lo, a_place, a_step, b_hi, b_lo, b_place, b_step, depth, TILE, DEPTH)
    total = total * (alpha * tl.load(a_unit + matrix)) * tl.load(b_unit + matrix)
    if ADD == 1:
        inside = (row < m)[:, None] & (column < n)[None, :]
        place = matrix * m * n + row[:, None] * n + column[None, :]
        total += beta * tl.load(c + place, mask=inside, other=0.0)
    if ADD == 2:
        within = (row < padded_m)[:, None] & (column < padded_n)[None, :]
        place = matrix * padded_m * padded_n + row[:, None] * padded_n + column[None, :]
        total += (beta * tl.load(c_unit + matrix)) * load_parts(c, c_lo, place, within)
    if SYMMETRIC and i == j:  # symmetric to the bit
        total = mirrored_tile(total, row, column)
    PARTS: tl.constexpr = WRITE == 2
    if PARTS:
        power = power_below(tl.load(bound + matrix)) if BOUNDED else 1.0
        tl.store(out_unit + matrix, power / 4096.0, mask=tl.program_id(0) == 0)
        total = total * (4096.0 / power)
        m, n = padded_m, padded_n
    out, out_lo = out + matrix * m * n, out_lo + matrix * m * n
    store_tile(out, out_lo, row, column, m, n, total, PARTS)
    if SYMMETRIC and i != j:
        store_tile(out, out_lo, column, row, n, m, tl.trans(total), PARTS)


@triton.jit(do_not_specialize=["n", "padded_n", "padded_m"])
def _correction_kernel(
    q_hi, q_lo, q_unit, out_hi, out_lo, out_unit, errors, n, padded_n, padded_m,
    TILE: tl.constexpr, DEPTH: tl.constexpr, SUPER: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Compute I - U, and partial sums of squares; see ``correction`` of ``linalg.backend``."""
    matrix = tl.program_id(1).to(tl.int64)
    i, j = place_of_tile(n, n, TILE, SUPER)
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    a_line, b_line = wrapped(row, padded_n, PAD), wrapped(column, padded_n, PAD)
    padded_m, padded_n = padded_m // PAD * PAD, padded_n // PAD * PAD
    first = matrix * padded_m * padded_n
    size = matrix * padded_n * padded_n
    out_hi, out_lo = out_hi + size, out_lo + size
    tl.store(out_unit + matrix, 1.0 / 4096.0, mask=tl.program_id(0) == 0)
    tile = matrix * tl.num_programs(0) + tl.program_id(0)
    if i > j:
        tl.store(errors + tile, 0.0)
        zero = tl.zeros((TILE, TILE), dtype=tl.float32)
        store_tile(out_hi, out_lo, row, column, padded_n, padded_n, zero, True)
        return
    total = accumulate(
        q_hi, q_lo, first + a_line[:, None] + k[None, :] * padded_n, DEPTH * padded_n,
        q_hi, q_lo, first + k[:, None] * padded_n + b_line[None, :], DEPTH * padded_n,
        padded_m, TILE, DEPTH,
    )  # fmt: skip
    unit = tl.load(q_unit + matrix)
    total = total * unit * unit
    inside = (row < n)[:, None] & (column < n)[None, :]
    on = row[:, None] == column[None, :]
    error = tl.where(inside, total - tl.where(on, 1.0, 0.0), 0.0)
    error = tl.where(row[:, None] > column[None, :], 0.0, error)
    tl.store(errors + tile, tl.sum(error * error))
    value = tl.where(on, tl.where(inside, 1.0, 0.0) - 0.5 * error, -error) * 4096.0
    store_tile(out_hi, out_lo, row, column, padded_n, padded_n, value, True)


def tiles(size: int) -> int:
    """Return the number of tiles along a side."""
    return -(-size // PRODUCT["TILE"])


def multiply(
    A: Split,
    B: Split,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    triangular: bool = False,
    out: Tensor | None = None,
    only: Tensor | None = None,
) -> Tensor:
    """Multiply and add as ``linalg.products.multiply`` does, on split operands.

    ``only``, bool (k,), marks the matrices that are wanted; other results are undefined.
    """
    if out is None:
        out = torch.empty(len(A.hi), A.rows, B.columns, dtype=torch.float32, device=A.hi.device)
    _launch(A, B, C, out, alpha, beta, symmetric, triangular, only=only)
    return out


def compose(
    A: Split,
    B: Split,
    C: Tensor | Split | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    bound: Tensor | None = None,
    only: Tensor | None = None,
) -> Split:
    """Multiply and add as ``compose`` of ``linalg.backend``; for ``only``, see ``multiply``."""
    out = empty_split((len(A.hi), A.rows, B.columns), A.hi.device)
    _launch(A, B, C, out, alpha, beta, symmetric, bound=bound, only=only)
    return out


def _launch(
    A: Split,
    B: Split,
    C: Tensor | Split | None,
    out: Tensor | Split,
    alpha: float,
    beta: float,
    symmetric: bool,
    triangular: bool = False,
    bound: Tensor | None = None,
    only: Tensor | None = None,
) -> None:
    assert not (isinstance(C, Split) and C.transposed), "C has the layout of the result"
    adds, added = (_NOTHING, out) if C is None else (_kind(C), C)
    masks = A.unit if bound is None else bound, A.unit if only is None else only
    sizes = A.rows, B.columns, A.hi.shape[-2], B.hi.shape[-1], A.hi.shape[-1]
    tensors = *A[:3], *B[:3], *_tensors(added), *_tensors(out), *masks
    flags = {"A_TRANSPOSED": A.transposed, "B_TRANSPOSED": B.transposed, "ADD": adds}
    flags |= {"WRITE": _kind(out), "BOUNDED": bound is not None, "SYMMETRIC": symmetric}
    flags |= {"TRIANGULAR": triangular, "MASKED": only is not None, **PRODUCT}
    grid = tiles(A.rows) * tiles(B.columns), len(A.hi)
    launch(_product_kernel, grid, *tensors, *sizes, float(alpha), float(beta), **flags)


def _kind(x: Tensor | Split) -> int:
    return _PARTS if isinstance(x, Split) else _FLOATS


def _tensors(x: Tensor | Split) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments for a matrix: its parts and units, or the same tensor three times."""
    if isinstance(x, Split):
        return x[:3]
    x = x.contiguous()
    return x, x, x


def correction(Q: Split) -> tuple[Split, Tensor]:
    """Return I - U, and partial sums of squares; see ``linalg.backend``."""
    assert not Q.transposed, "the kernel reads Q by columns"
    k, n = len(Q.hi), Q.columns
    out = empty_split((k, n, n), Q.hi.device)
    errors = torch.empty(k, tiles(n) ** 2, dtype=torch.float32, device=Q.hi.device)
    sizes = n, *reversed(Q.hi.shape[1:])
    launch(_correction_kernel, (errors.shape[1], k), *Q[:3], *out[:3], errors, *sizes, **PRODUCT)
    return out, errors
