"""The ordinary step for blocks of all shapes at once: a table says which program does what.

Every block is a line of integers (``Field``): where its gradient, its roots and its scratch are.
Every program of a launch finds its block in a list, and which of the block's programs is the first.
So the number of launches does not grow with the number of parameters or shapes.

Gradients are found by a table of addresses (``kernels.gradients``), the step's buffers by another
(``Buffer``), so that a captured graph stays valid although they move.

A root is D + O: a float32 diagonal, and the rest. Products with O run in float16 and add up in
float32; the product with D, which is most of it, is done in float32 on the way. What goes in and
what lies between two passes is kept in float16, divided by powers of two (``lines.gradient_unit``,
``lines.root_unit``) that keep it inside of float16's range. Where its 11 bits are not enough
(PRECISE), O and all that is multiplied with it are sums of two bf16 numbers, hi + lo, and the
tensor cores multiply both: 16 bits, and no units.

Scratch is padded to multiples of ``PAD`` with zeros, so that the loads of products need no masks.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from kronbit.kernels.gradients import BFLOAT16, FLOAT32, find, load, store
from kronbit.kernels.lines import (
    CODES,
    DIAGONAL,
    DIAGONAL_STRIDE,
    GRADIENT,
    HELD,
    HELD_STACK,
    LEFT,
    LINE,
    MEMBER,
    NORMS,
    PADDING,
    RIGHT,
    SCALES,
    STRIDE,
    TO_RIGHT,
    M,
    N,
    X,
    gradient_unit,
    keep,
    padded,
    root_unit,
    scratch,
)
from kronbit.quantization.triton import restore

# Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
_WIDEN: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# What lies between passes is divided by this. Sums of n products of numbers up to 1 with such that
# have a norm of 2¹⁵ stay below 2¹⁵ times the root of n; two of them are added.
_ROOM: tl.constexpr = tl.constexpr(256.0)
# What scatter does with a gradient, where it does not scale Ĝ.
_LEAVE: tl.constexpr = tl.constexpr(-1.0)
_ZERO: tl.constexpr = tl.constexpr(-2.0)


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
def roots_kernel(
    programs,
    blocks,
    addresses,
    buffers,
    anchor,
    units,
    table,
    PRECISE: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Restore some rows of O; the diagonal counts as zero."""
    program = programs + tl.program_id(0) * 3
    block, side = tl.load(program), tl.load(program + 1)
    line = blocks + block * LINE
    address, _ = find(addresses, tl.load(line + MEMBER))
    if address == 0:
        return
    n = tl.load(line + M + side).to(tl.int32)
    wide = padded(n)
    unit = 1.0
    if not PRECISE:
        unit = root_unit(line, side, n)
    first = (tl.program_id(0) - tl.load(program + 2)) * ROWS
    tl.store(units + block * 2 + side, unit, mask=first == 0)
    row = first + tl.arange(0, ROWS)[:, None]
    codes = tl.load(line + CODES + side * TO_RIGHT)
    scales = tl.load(line + SCALES + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    code_length = (n * BITS + 7) // 8
    scale_length = (n + BLOCK - 1) // BLOCK
    out = scratch(anchor, buffers, tl.load(line + LEFT + side))
    for start in range(0, wide, COLUMNS):
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
        inside = (row < wide) & (column < wide)
        keep(out + row * wide + column, wide * wide, value * (1.0 / unit), inside, PRECISE)


@triton.jit
def _place(line, n, WIDE: tl.constexpr):
    """Where a block's gradient begins, from row to row there, and n; WIDE: multiples of 8."""
    first, stride = tl.load(line + GRADIENT), tl.load(line + STRIDE)
    if WIDE:
        first, stride = tl.multiple_of(first, 8), tl.multiple_of(stride, 8)
        n = tl.multiple_of(n, 8)
    return first, stride, n


@triton.jit
def gather_kernel(
    programs,
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
    program = programs + tl.program_id(0) * 2
    line = blocks + tl.load(program) * LINE
    member = tl.load(line + MEMBER)
    address, kind = find(addresses, member)
    if address == 0:
        return
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    padded_m, padded_n = padded(m), padded(n)
    row = (tl.program_id(0) - tl.load(program + 1)) * ROWS + tl.arange(0, ROWS)[:, None]
    first, stride, n = _place(line, n, WIDE)
    unit = 1.0
    if not PRECISE:
        unit = gradient_unit(buffers, member)
    out = scratch(anchor, buffers, tl.load(line + X))
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = first + row.to(tl.int64) * stride + column
        value = load(address, kind, place, (row < m) & (column < n), WIDE)
        inside = (row < padded_m) & (column < padded_n)
        place = out + row * padded_n + column
        keep(place, padded_m * padded_n, value * (1.0 / unit), inside, PRECISE)


@triton.jit
def _unit_between(
    left_unit, right_unit, BY_LEFT: tl.constexpr, BY_RIGHT: tl.constexpr, PRECISE: tl.constexpr
):
    """The power of two by which the result of a pass is divided, for the next one."""
    unit = 1.0
    if not PRECISE:
        if BY_LEFT:
            unit = left_unit * _ROOM
        if BY_RIGHT:
            unit = tl.maximum(right_unit * _ROOM, unit) if BY_LEFT else right_unit * _ROOM
    return unit


@triton.jit(do_not_specialize=["first_square"])
def pass_kernel(
    programs,
    blocks,
    addresses,
    buffers,
    anchor,
    units,
    squares,
    first_square,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BY_LEFT: tl.constexpr,
    BY_RIGHT: tl.constexpr,
    BEFORE_LEFT: tl.constexpr,
    BEFORE_RIGHT: tl.constexpr,
    PRECISE: tl.constexpr,
    LAST: tl.constexpr,
    COMPARE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One pass of the rule on a tile: L̂ X, X R̂, or L̂ X + X R̂; and what the pass before it did.

    The last one also sums up squares. Or it writes nothing (COMPARE), and sums up the products of
    its Ĝ with a held one in bf16, of its own with itself and of the held one with itself.
    """
    program = tl.program_id(0)
    block = tl.load(programs + program * 2)
    line = blocks + block * LINE
    member = tl.load(line + MEMBER)
    address, _ = find(addresses, member)
    if address == 0:
        if COMPARE:
            for i in tl.static_range(3):
                tl.store(squares + (first_square + program) * 3 + i, 0.0)
        elif LAST:
            tl.store(squares + first_square + program, 0.0)
        return
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    padded_m, padded_n = padded(m), padded(n)
    tile, across = program - tl.load(programs + program * 2 + 1), tl.cdiv(n, TILE_N)
    row = tile // across * TILE_M + tl.arange(0, TILE_M)
    column = tile % across * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, DEPTH)
    # Rows beyond the padding wrap around: what they give is never stored.
    x_row = row % padded_m
    x_column = tl.max_contiguous(tl.multiple_of(column % padded_n, PADDING), PADDING)
    x = scratch(anchor, buffers, tl.load(line + SOURCE))
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    size = padded_m * padded_n
    left_unit, right_unit = tl.load(units + block * 2), tl.load(units + block * 2 + 1)
    if BY_LEFT:
        left = scratch(anchor, buffers, tl.load(line + LEFT))
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
        total *= left_unit
    if BY_RIGHT:
        right = scratch(anchor, buffers, tl.load(line + RIGHT))
        if BY_LEFT:
            total *= 1.0 / right_unit
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
        total *= right_unit
    place = x_row[:, None] * padded_n + x_column[None, :]
    value = tl.load(x + place).to(tl.float32)
    if PRECISE:
        value += tl.load(x + size + place).to(tl.float32)
    if BY_LEFT:
        diagonal = tl.load(line + DIAGONAL).to(tl.pointer_type(tl.float32))
        stride = tl.load(line + DIAGONAL_STRIDE)
        total += tl.load(diagonal + row * stride, mask=row < m, other=0.0)[:, None] * value
    if BY_RIGHT:
        diagonal = tl.load(line + DIAGONAL + TO_RIGHT).to(tl.pointer_type(tl.float32))
        stride = tl.load(line + DIAGONAL_STRIDE + TO_RIGHT)
        total += tl.load(diagonal + column * stride, mask=column < n, other=0.0)[None, :] * value
    if not LAST:
        y = scratch(anchor, buffers, tl.load(line + TARGET))
        inside = (row < padded_m)[:, None] & (column < padded_n)[None, :]
        total *= 1.0 / _unit_between(left_unit, right_unit, BY_LEFT, BY_RIGHT, PRECISE)
        keep(y + row[:, None] * padded_n + column[None, :], size, total, inside, PRECISE)
    else:
        if not PRECISE:
            total *= gradient_unit(buffers, member)
        total *= _unit_between(left_unit, right_unit, BEFORE_LEFT, BEFORE_RIGHT, PRECISE)
        total = tl.where((row < m)[:, None] & (column < n)[None, :], total, 0.0)
        inside = (row < padded_m)[:, None] & (column < padded_n)[None, :]
        first = tl.multiple_of(tl.load(line + HELD), PADDING)
        place = first + row[:, None] * padded_n + column[None, :]
        stack = tl.load(buffers + HELD_STACK)
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
    norm = tl.load(tl.load(buffers + NORMS).to(tl.pointer_type(tl.float32)) + member)
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
    programs,
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
    program = programs + tl.program_id(0) * 2
    line = blocks + tl.load(program) * LINE
    member = tl.load(line + MEMBER)
    scale = tl.load(scales + member)
    if scale == _LEAVE:
        return
    address, kind = find(addresses, member)
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    row = (tl.program_id(0) - tl.load(program + 1)) * ROWS + tl.arange(0, ROWS)[:, None]
    padded_m, padded_n = padded(m), padded(n)
    first, stride, n = _place(line, n, WIDE)
    stack = tl.load(buffers + HELD_STACK)
    source = tl.multiple_of(tl.load(line + HELD), PADDING) + row * padded_n
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < padded_m) & (column < padded_n)
        value = load(stack, FLOAT32 if PRECISE else BFLOAT16, source + column, inside, True)
        value = tl.where(scale == _ZERO, 0.0, value * scale)
        place = first + row.to(tl.int64) * stride + column
        store(address, kind, place, value, (row < m) & (column < n), WIDE)
