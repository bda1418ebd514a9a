"""G Gᵀ and Gᵀ G of blocks of many shapes, read from their gradients.

A line of integers describes a block and its product. The block is copied as two float16 parts,
transposed for Gᵀ G, and the copy is multiplied by its transpose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kronbit.kernels.gradients import MEMBER, TAPS, M, N, find, gradient_of, load, place_of
from kronbit.kernels.matmul import accumulate, place_of_tile, store_tile
from kronbit.kernels.split import PAD, magnitude_bits, power_below, store_parts

TILE = PAD  # side of a program's tile of a gradient
_PAD = tl.constexpr(PAD)
COUNT = TAPS.value + 4
_COUNT = tl.constexpr(COUNT)
# The last fields of a line: 1 for Gᵀ G, the first element of the copy, and its columns.
_RIGHT, _PLACE, _DEPTH = map(tl.constexpr, range(COUNT - 3, COUNT))


@triton.jit
def _tile_of(line, addresses, finite, TILE: tl.constexpr):
    """Return a tile of a block in float32, zero if the gradient is not finite; rows, columns, m."""
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    across = tl.cdiv(n, TILE)
    row = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    member = tl.load(line + MEMBER)
    address, kind = find(addresses, member)
    first, stride, taps = gradient_of(line, addresses, member, False)
    place = place_of(first, stride, taps, row[:, None], column[None, :], False)
    mask = (row < m)[:, None] & (column < n)[None, :]
    value = load(address, kind, place, mask)
    return tl.where(tl.load(finite + member) != 0, value, 0.0), row, column, m


@triton.jit
def largest_kernel(lines, addresses, finite, largest, TILE: tl.constexpr):
    """Find the largest magnitude of a block, as the bits of a float32."""
    row = tl.program_id(1).to(tl.int64)
    value, rows, _, m = _tile_of(lines + row * _COUNT, addresses, finite, TILE)
    if tl.min(rows) < m:
        tl.atomic_max(largest + row, tl.max(magnitude_bits(value)))


@triton.jit
def copy_kernel(lines, addresses, finite, largest, hi, lo, unit, TILE: tl.constexpr):
    """Copy a block in two parts, transposed for Gᵀ G."""
    matrix = tl.program_id(1).to(tl.int64)
    line = lines + matrix * _COUNT
    value, row, column, m = _tile_of(line, addresses, finite, TILE)
    if tl.min(row) >= m:
        return
    power = power_below(tl.load(largest + matrix).to(tl.float32, bitcast=True))
    tl.store(unit + matrix, power / 4096.0, mask=tl.program_id(0) == 0)
    value = value * (4096.0 / power)
    first = tl.multiple_of(tl.load(line + _PLACE), _PAD)
    depth = tl.load(line + _DEPTH)
    # Tiles have the size of the padding, so no tile reaches beyond it.
    everywhere = row[:, None] + column[None, :] >= 0
    if tl.load(line + _RIGHT) == 0:
        place = first + row[:, None] * depth + column[None, :]
        store_parts(hi, lo, place, value, everywhere)
    else:
        place = first + column[:, None] * depth + row[None, :]
        store_parts(hi, lo, place, tl.trans(value), everywhere)


@triton.jit(do_not_specialize=["n"])
def outer_kernel(
    lines, hi, lo, unit, out, n, TILE: tl.constexpr, DEPTH: tl.constexpr, SUPER: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Multiply a copy by its transpose; the result is symmetric, and zero beyond its order."""
    matrix = tl.program_id(1).to(tl.int64)
    i, j = place_of_tile(n, n, TILE, SUPER)
    if j > i:
        return
    line = lines + matrix * _COUNT
    first = tl.multiple_of(tl.load(line + _PLACE), PAD)
    depth = tl.multiple_of(tl.load(line + _DEPTH).to(tl.int32), PAD)
    side = tl.where(tl.load(line + _RIGHT) == 0, M, N)
    order = tl.load(line + side).to(tl.int32)
    length = tl.where(i * TILE < order, depth, 0)
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    # Rows beyond the padding wrap around: their results are never stored.
    padded = tl.cdiv(order, PAD) * PAD
    total = accumulate(
        hi, lo, first + (row % padded)[:, None] * depth + k[None, :], DEPTH,
        hi, lo, first + k[:, None] + (column % padded)[None, :] * depth, DEPTH,
        length, TILE, DEPTH,
    )  # fmt: skip
    scale = tl.load(unit + matrix)
    within = (row < order)[:, None] & (column < order)[None, :]
    total = tl.where(within, total * scale * scale, 0.0)
    out += matrix * n * n
    store_tile(out, out, row, column, n, n, total, False)
    if i != j:
        store_tile(out, out, column, row, n, n, tl.trans(total), False)
