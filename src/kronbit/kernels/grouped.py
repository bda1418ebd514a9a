"""The ordinary step for blocks of all shapes at once: a table says which program does what.

Every block is a line of integers (``Field``): where its gradient, its roots and its scratch are.
Every program of a launch finds its block and its place in it in a list of tiles. So the number of
launches does not grow with the number of parameters or shapes.

Gradients are found by a table of addresses (``kernels.gradients``), the step's buffers by another
(``Buffer``), so that a captured graph stays valid although they move.

A root is D + O: a float32 diagonal, and the rest. Products with O run in bf16 and add up in
float32; the product with D, which is most of it, is done in float32 on the way. What goes in, what
lies between two passes and what comes out is kept in bf16. Where that is not enough (PRECISE), O
and all that is multiplied with it are sums of two bf16 numbers, hi + lo, and the tensor cores
multiply both: 16 bits instead of 8; Ĝ is float32 then.

Scratch is padded to multiples of ``PAD`` with zeros, so that the loads of products need no masks.
"""

from __future__ import annotations

import enum
import os

import triton
import triton.language as tl

from kronbit.kernels.gradients import BFLOAT16, FLOAT32, find, load, store
from kronbit.quantization.triton import restore

PAD = 64
STRIP = 16  # rows of a block that a program gathers, restores or scatters
_PAD: tl.constexpr = tl.constexpr(PAD)
# Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
_WIDEN: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Field(enum.IntEnum):
    """What stands where in a block's line."""

    MEMBER = 0
    M = 1
    N = 2
    GRADIENT = 3  # first element in the parameter's gradient
    STRIDE = 4  # from row to row there
    LEFT = 5  # scratch: O of L̂
    RIGHT = 6  # scratch: O of R̂
    X = 7  # scratch: hi, then lo where it is kept
    Y = 8
    HELD = 9  # first element of Ĝ in the held stack
    CODES = 10  # addresses of L̂; those of R̂ follow, OTHER_SIDE later
    SCALES = 11
    DIAGONAL = 12
    DIAGONAL_STRIDE = 13


class Buffer(enum.IntEnum):
    """What stands where in the table of a step's buffers."""

    SCRATCH = 0  # not an address, but elements from the anchor on
    HELD = 1  # the address of the held stack
    NORMS = 2  # the address of ‖G‖_F of every member
    LENGTH = 3


OTHER_SIDE = 4
COUNT = 18  # integers in a line


_MEMBER: tl.constexpr = tl.constexpr(int(Field.MEMBER))
_M: tl.constexpr = tl.constexpr(int(Field.M))
_N: tl.constexpr = tl.constexpr(int(Field.N))
_GRADIENT: tl.constexpr = tl.constexpr(int(Field.GRADIENT))
_STRIDE: tl.constexpr = tl.constexpr(int(Field.STRIDE))
_LEFT: tl.constexpr = tl.constexpr(int(Field.LEFT))
_RIGHT: tl.constexpr = tl.constexpr(int(Field.RIGHT))
_X: tl.constexpr = tl.constexpr(int(Field.X))
_HELD: tl.constexpr = tl.constexpr(int(Field.HELD))
_CODES: tl.constexpr = tl.constexpr(int(Field.CODES))
_SCALES: tl.constexpr = tl.constexpr(int(Field.SCALES))
_DIAGONAL: tl.constexpr = tl.constexpr(int(Field.DIAGONAL))
_DIAGONAL_STRIDE: tl.constexpr = tl.constexpr(int(Field.DIAGONAL_STRIDE))
_OTHER_SIDE: tl.constexpr = tl.constexpr(OTHER_SIDE)
_COUNT: tl.constexpr = tl.constexpr(COUNT)
_SCRATCH: tl.constexpr = tl.constexpr(int(Buffer.SCRATCH))
_HELD_STACK: tl.constexpr = tl.constexpr(int(Buffer.HELD))
_NORMS: tl.constexpr = tl.constexpr(int(Buffer.NORMS))

# What scatter does with a gradient, where it does not scale Ĝ.
_LEAVE: tl.constexpr = tl.constexpr(-1.0)
_ZERO: tl.constexpr = tl.constexpr(-2.0)


@triton.jit
def _padded(size):
    return (size + (_PAD - 1)) // _PAD * _PAD


@triton.jit
def _dot(a, b, total):
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _multiply(
    a, a_size, a_step, b, b_size, b_step, depth, total, PRECISE: tl.constexpr, DEPTH: tl.constexpr
):
    """Add a product; lo parts lie ``size`` elements behind hi, ``step`` leads along the depth."""
    for _ in range(0, depth, DEPTH):
        high_a, high_b = tl.load(a), tl.load(b)
        if PRECISE:
            total = _dot(tl.load(a + a_size), high_b, total)
            total = _dot(high_a, tl.load(b + b_size), total)
        total = _dot(high_a, high_b, total)
        a += a_step
        b += b_step
    return total


@triton.jit
def _scratch(anchor, buffers, offset):
    """A place in the scratch: seen from a tensor that stays where it is.

    A pointer made of an integer counts as unaligned; its loads would go element by element.
    """
    return anchor + tl.multiple_of(tl.load(buffers + _SCRATCH) + offset, _PAD)


@triton.jit
def _keep(target, size, value, mask, PRECISE: tl.constexpr):
    """Keep a float32 value as hi (+ lo) in bf16; lo lies ``size`` elements behind hi."""
    high = value.to(tl.bfloat16)
    tl.store(target, high, mask=mask)
    if PRECISE:
        tl.store(target + size, (value - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def roots_kernel(
    tiles,
    blocks,
    addresses,
    buffers,
    anchor,
    table,
    PRECISE: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Restore some rows of O in bf16; the diagonal counts as zero."""
    tile = tiles + tl.program_id(0) * 3
    line = blocks + tl.load(tile) * _COUNT
    side = tl.load(tile + 1)
    address, _ = find(addresses, tl.load(line + _MEMBER))
    if address == 0:
        return
    n = tl.load(line + _M + side).to(tl.int32)
    padded = _padded(n)
    first = tl.load(tile + 2)
    row = first + tl.arange(0, ROWS)[:, None]
    codes = tl.load(line + _CODES + side * _OTHER_SIDE)
    scales = tl.load(line + _SCALES + side * _OTHER_SIDE).to(tl.pointer_type(tl.float32))
    code_length = (n * BITS + 7) // 8
    scale_length = (n + BLOCK - 1) // BLOCK
    out = _scratch(anchor, buffers, tl.load(line + _LEFT + side))
    for start in range(0, padded, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = (row < n) & (column < n) & (row != column)
        if BITS == 32:
            place = codes.to(tl.pointer_type(tl.float32)) + row * n + column
            value = tl.load(place, mask=mask, other=0.0)
        elif WORDS:
            # As restore does, but eight codes are read as one word, and their scale once.
            word = start // 8 + tl.arange(0, COLUMNS // 8)[None, :]
            known = (row < n) & (word < n // 8)
            base = codes.to(tl.pointer_type(tl.int32)) + row * (n // 8)
            eight = tl.load(base + word, mask=known, other=0)
            place = row * scale_length + word * 8 // BLOCK
            scale = tl.load(scales + place, mask=known, other=0.0)
            code = (eight[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
            value = tl.load(table + code) * scale[:, :, None]
            value = tl.where(row != column, tl.reshape(value, (ROWS, COLUMNS)), 0.0)
        else:
            base = codes.to(tl.pointer_type(tl.uint8)) + row * code_length
            value = restore(base, scales + row * scale_length, table, column, mask, BITS, BLOCK)
            value = tl.where(mask, value, 0.0)
        inside = (row < padded) & (column < padded)
        _keep(out + row * padded + column, padded * padded, value, inside, PRECISE)


@triton.jit
def _place(line, n, WIDE: tl.constexpr):
    """Where a block's gradient begins, from row to row there, and n; WIDE: multiples of 8."""
    first, stride = tl.load(line + _GRADIENT), tl.load(line + _STRIDE)
    if WIDE:
        first, stride = tl.multiple_of(first, 8), tl.multiple_of(stride, 8)
        n = tl.multiple_of(n, 8)
    return first, stride, n


@triton.jit
def gather_kernel(
    tiles,
    blocks,
    addresses,
    buffers,
    anchor,
    PRECISE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy some rows of G into scratch."""
    tile = tiles + tl.program_id(0) * 2
    line = blocks + tl.load(tile) * _COUNT
    address, kind = find(addresses, tl.load(line + _MEMBER))
    if address == 0:
        return
    m, n = tl.load(line + _M).to(tl.int32), tl.load(line + _N).to(tl.int32)
    padded_m, padded_n = _padded(m), _padded(n)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)[:, None]
    first, stride, n = _place(line, n, WIDE)
    out = _scratch(anchor, buffers, tl.load(line + _X))
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = first + row.to(tl.int64) * stride + column
        value = load(address, kind, place, (row < m) & (column < n), WIDE)
        inside = (row < padded_m) & (column < padded_n)
        _keep(out + row * padded_n + column, padded_m * padded_n, value, inside, PRECISE)


@triton.jit(do_not_specialize=["first_square"])
def pass_kernel(
    tiles,
    blocks,
    addresses,
    buffers,
    anchor,
    squares,
    first_square,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BY_LEFT: tl.constexpr,
    BY_RIGHT: tl.constexpr,
    PRECISE: tl.constexpr,
    LAST: tl.constexpr,
    COMPARE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One pass of the rule on a tile: L̂ X, X R̂, or L̂ X + X R̂.

    The last one also sums up squares. Or it writes nothing (COMPARE), and sums up the products of
    its Ĝ with a held one in bf16, of its own with itself and of the held one with itself.
    """
    program = tl.program_id(0)
    line = blocks + tl.load(tiles + program * 3) * _COUNT
    address, _ = find(addresses, tl.load(line + _MEMBER))
    if address == 0:
        if COMPARE:
            for i in tl.static_range(3):
                tl.store(squares + (first_square + program) * 3 + i, 0.0)
        elif LAST:
            tl.store(squares + first_square + program, 0.0)
        return
    m, n = tl.load(line + _M).to(tl.int32), tl.load(line + _N).to(tl.int32)
    padded_m, padded_n = _padded(m), _padded(n)
    row = tl.load(tiles + program * 3 + 1) + tl.arange(0, TILE_M)
    column = tl.load(tiles + program * 3 + 2) + tl.arange(0, TILE_N)
    k = tl.arange(0, DEPTH)
    # Rows beyond the padding wrap around: what they give is never stored.
    x_row = row % padded_m
    x_column = tl.max_contiguous(tl.multiple_of(column % padded_n, _PAD), _PAD)
    x = _scratch(anchor, buffers, tl.load(line + SOURCE))
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    size = padded_m * padded_n
    if BY_LEFT:
        left = _scratch(anchor, buffers, tl.load(line + _LEFT))
        total = _multiply(
            left + x_row[:, None] * padded_m + k[None, :],
            padded_m * padded_m,
            DEPTH,
            x + k[:, None] * padded_n + x_column[None, :],
            size,
            DEPTH * padded_n,
            padded_m,
            total,
            PRECISE,
            DEPTH,
        )
    if BY_RIGHT:
        right = _scratch(anchor, buffers, tl.load(line + _RIGHT))
        total = _multiply(
            x + x_row[:, None] * padded_n + k[None, :],
            size,
            DEPTH,
            right + k[:, None] * padded_n + x_column[None, :],
            padded_n * padded_n,
            DEPTH * padded_n,
            padded_n,
            total,
            PRECISE,
            DEPTH,
        )
    place = x_row[:, None] * padded_n + x_column[None, :]
    value = tl.load(x + place).to(tl.float32)
    if PRECISE:
        value += tl.load(x + size + place).to(tl.float32)
    if BY_LEFT:
        diagonal = tl.load(line + _DIAGONAL).to(tl.pointer_type(tl.float32))
        stride = tl.load(line + _DIAGONAL_STRIDE)
        total += tl.load(diagonal + row * stride, mask=row < m, other=0.0)[:, None] * value
    if BY_RIGHT:
        diagonal = tl.load(line + _DIAGONAL + _OTHER_SIDE).to(tl.pointer_type(tl.float32))
        stride = tl.load(line + _DIAGONAL_STRIDE + _OTHER_SIDE)
        total += tl.load(diagonal + column * stride, mask=column < n, other=0.0)[None, :] * value
    if not LAST:
        y = _scratch(anchor, buffers, tl.load(line + TARGET))
        inside = (row < padded_m)[:, None] & (column < padded_n)[None, :]
        _keep(y + row[:, None] * padded_n + column[None, :], size, total, inside, PRECISE)
    else:
        total = tl.where((row < m)[:, None] & (column < n)[None, :], total, 0.0)
        inside = (row < padded_m)[:, None] & (column < padded_n)[None, :]
        first = tl.multiple_of(tl.load(line + _HELD), _PAD)
        place = first + row[:, None] * padded_n + column[None, :]
        stack = tl.load(buffers + _HELD_STACK)
        if COMPARE:
            other = load(stack, BFLOAT16, place, inside, True)
            sums = squares + (first_square + program) * 3
            tl.store(sums, tl.sum(total * other))
            tl.store(sums + 1, tl.sum(total * total))
            tl.store(sums + 2, tl.sum(other * other))
        else:
            store(stack, FLOAT32 if PRECISE else BFLOAT16, place, total, inside, True)
            tl.store(squares + first_square + program, tl.sum(total * total))


@triton.jit
def graft_kernel(
    members,
    addresses,
    buffers,
    squares,
    scales,
    ratios,
    ungrafted,
    ZERO_NONFINITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """‖G‖ / ‖Ĝ‖ of a member, or what scatter shall do instead."""
    line = members + tl.program_id(0) * 3
    member, start, stop = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    address, _ = find(addresses, member)
    if address == 0:
        tl.store(scales + member, _LEAVE)
        return
    total = 0.0
    for first in range(start, stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(squares + place, mask=place < stop, other=0.0))
    norm = tl.load(tl.load(buffers + _NORMS).to(tl.pointer_type(tl.float32)) + member)
    scale = norm / (tl.sqrt(total) + 1e-12)
    tl.store(ratios + member, scale)
    finite = tl.abs(norm) < float("inf")  # False for NaN
    usable = (total < float("inf")) & (scale < float("inf"))
    # Where Ĝ overflowed although G is finite, F gets G itself.
    action = tl.where(usable, scale, _LEAVE)
    action = tl.where(finite, action, _ZERO if ZERO_NONFINITE else _LEAVE)
    tl.store(scales + member, action)
    tl.atomic_add(ungrafted, tl.where(finite & (usable == 0), 1, 0).to(tl.int64))


@triton.jit
def scatter_kernel(
    tiles,
    blocks,
    addresses,
    buffers,
    scales,
    PRECISE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write some rows of G̃ over the gradient."""
    tile = tiles + tl.program_id(0) * 2
    line = blocks + tl.load(tile) * _COUNT
    member = tl.load(line + _MEMBER)
    scale = tl.load(scales + member)
    if scale == _LEAVE:
        return
    address, kind = find(addresses, member)
    m, n = tl.load(line + _M).to(tl.int32), tl.load(line + _N).to(tl.int32)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)[:, None]
    padded_m, padded_n = _padded(m), _padded(n)
    first, stride, n = _place(line, n, WIDE)
    stack = tl.load(buffers + _HELD_STACK)
    source = tl.multiple_of(tl.load(line + _HELD), _PAD) + row * padded_n
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < padded_m) & (column < padded_n)
        value = load(stack, FLOAT32 if PRECISE else BFLOAT16, source + column, inside, True)
        value = tl.where(scale == _ZERO, 0.0, value * scale)
        place = first + row.to(tl.int64) * stride + column
        store(address, kind, place, value, (row < m) & (column < n), WIDE)
