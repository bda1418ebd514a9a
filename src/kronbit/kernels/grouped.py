"""The products of the ordinary step, Ĝ = L̂ G R̂, for blocks of all shapes at once, and grafting.

The ordinary step updates no statistic: it only preconditions gradients G by the inverse roots L̂ and
R̂. A line of integers describes a block: where its gradient, its roots and its scratch are. A list
contains the block of every program, and the first program of that block. So the number of launches
does not grow with the number of parameters or shapes.

One table holds the addresses of gradients (``kernels.gradients``), another the addresses of the
step's buffers, so a captured graph stays valid when they move.

Products multiply float16 and add in float32. Operands are divided by powers of two
(``gradient_unit``, ``root_unit``) that keep them in float16's range. A gradient in bf16 can be an
operand without a copy (DIRECT); then R̂, the other operand, is in bf16, too. Where float16 is not
accurate enough (PRECISE), every operand is a sum of two bf16 numbers, hi + lo, and the tensor cores
multiply both: 16 bits, and no units.

Scratch is padded to multiples of ``PAD`` with zeros, so loads of products need no masks. (With
DIRECT, padding rows of G R̂ repeat other rows; L̂ has zeros there.)
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from kronbit.kernels import gradients
from kronbit.kernels.compact import eight_codes, restore_by_rows, restore_tile, tile_at
from kronbit.kernels.gradients import BFLOAT16, FLOAT32, MEMBER, M, N, find
from kronbit.kernels.quantization import restore
from kronbit.kernels.split import PAD, power_below

STRIP = 16  # rows of a block that a program gathers, restores or scatters: a strip

# Fields of the line of a block, after those of ``gradients``.
LEFT = tl.constexpr(6)  # scratch: L̂
RIGHT = tl.constexpr(7)  # scratch: R̂
X = tl.constexpr(8)  # scratch: a copy of G
Y = tl.constexpr(9)  # scratch: the result of a pass
HELD = tl.constexpr(10)  # first element of Ĝ in the held stack
CODES = tl.constexpr(11)  # from here on, addresses of L̂; the fields of R̂ are TO_RIGHT later
SCALES = tl.constexpr(12)
TOPS = tl.constexpr(13)  # scales of the scales, if these are quantised
DIAGONAL = tl.constexpr(14)
DIAGONAL_STRIDE = tl.constexpr(15)
TO_RIGHT = tl.constexpr(5)
COUNT = 21  # integers in a line
LINE = tl.constexpr(COUNT)

# Fields of the table of a step's buffers.
SCRATCH = tl.constexpr(0)  # not an address: the offset from the anchor in elements
HELD_STACK = tl.constexpr(1)  # the address of the held stack
NORMS = tl.constexpr(2)  # the address of ‖G‖_F of every member
BUFFERS = 3

PADDING = tl.constexpr(PAD)

# Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
_WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Results between passes are divided by this. Sums of n products of numbers up to 1 and numbers of
# norm 2¹⁵ stay below 2¹⁵ √n; two sums are added.
_ROOM = tl.constexpr(256.0)

# A scale that tells ``scatter_kernel`` to leave the gradient unchanged.
LEAVE = tl.constexpr(-1.0)

# Elements of the tiles that a program restores and also writes mirrored.
_ELEMENTS = 4 * 64 * 64


def tiles_per_program(tile: int) -> int:
    """Return the number of tiles per program; 0 without tiles."""
    return _ELEMENTS // tile**2 if tile else 0


@triton.jit
def padded(size):
    """Return the padded size of a side."""
    return (size + (PADDING - 1)) // PADDING * PADDING


@triton.jit
def scratch(anchor, buffers, offset):
    """Return a pointer into the scratch, relative to the anchor, a tensor that does not move.

    A pointer made from an integer counts as unaligned and would load element by element.
    """
    return anchor + tl.multiple_of(tl.load(buffers + SCRATCH) + offset, PADDING)


@triton.jit
def keep(target, size, value, mask, PRECISE: tl.constexpr):
    """Store a float32 value in float16, or as hi + lo in bf16; lo is ``size`` elements after hi."""
    if PRECISE:
        high = value.to(tl.bfloat16)
        tl.store(target, high, mask=mask)
        tl.store(target + size, (value - high.to(tl.float32)).to(tl.bfloat16), mask=mask)
    else:
        tl.store(target, value.to(tl.float16), mask=mask)


@triton.jit
def gradient_unit(buffers, member):
    """Return the power of two that divides a gradient, so that no element exceeds 2¹⁵."""
    norms = tl.load(buffers + NORMS).to(tl.pointer_type(tl.float32))
    return power_below(tl.load(norms + member)) / 16384.0


@triton.jit
def root_unit(line, side, n):
    """Return the power of two that divides a root, so that no element exceeds 1.

    A root is positive semi-definite: its largest element is on the diagonal.
    """
    diagonal = tl.load(line + DIAGONAL + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    stride = tl.load(line + DIAGONAL_STRIDE + side * TO_RIGHT)
    largest = tl.zeros((256,), dtype=tl.float32)
    for start in range(0, n, 256):
        i = start + tl.arange(0, 256)
        value = tl.load(diagonal + i * stride, mask=i < n, other=0.0)
        largest = tl.maximum(largest, tl.abs(value))
    return 2.0 * power_below(tl.max(largest))


@triton.jit
def as_bf16(pointer):
    """Return a pointer into the scratch as one to bf16 numbers."""
    return pointer.to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def put(out, wide, row, column, value, mask, side, PRECISE: tl.constexpr, DIRECT: tl.constexpr):
    """Store elements of a root in the scratch."""
    place = out + row * wide + column
    if DIRECT:
        if side == 1:
            tl.store(as_bf16(place), value.to(tl.bfloat16), mask=mask)
        else:
            tl.store(place, value.to(tl.float16), mask=mask)
    else:
        keep(place, wide * wide, value, mask, PRECISE)


@triton.jit
def roots_kernel(
    programs, blocks, addresses, buffers, anchor, units, table, squares,
    PRECISE: tl.constexpr, DIRECT: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
    COMPACT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Restore rows or tiles of a root."""
    program = programs + tl.program_id(0) * 3
    block, side = tl.load(program), tl.load(program + 1)
    line = blocks + block * LINE
    # All fields are loaded before any is used, so that the latencies overlap.
    member, n = tl.load(line + MEMBER), tl.load(line + M + side).to(tl.int32)
    codes = tl.load(line + CODES + side * TO_RIGHT)
    scales = tl.load(line + SCALES + side * TO_RIGHT)
    tops = tl.load(line + TOPS + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    diagonal = tl.load(line + DIAGONAL + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    stride = tl.load(line + DIAGONAL_STRIDE + side * TO_RIGHT)
    out = scratch(anchor, buffers, tl.load(line + LEFT + side))
    address, _ = find(addresses, member)
    if address == 0:
        return
    wide = padded(n)
    unit = 1.0 if PRECISE else root_unit(line, side, n)
    number = tl.program_id(0) - tl.load(program + 2)
    tl.store(units + block * 2 + side, unit, mask=number == 0)
    inverse = 1.0 / unit
    if TILE > 0:
        scales = scales.to(tl.pointer_type(tl.uint8))
        stored = (n + TILE - 1) // TILE
        count = stored * (stored + 1) // 2 * TILE
        for index in range(TILES):
            tile = number * TILES + index
            i, j = tile_at(tile)
            value = restore_tile(codes, scales, tops, table, squares, tile, count, BITS, TILE)
            value *= inverse
            other = tl.trans(value)
            row = i * TILE + tl.arange(0, TILE)[:, None]
            column = j * TILE + tl.arange(0, TILE)[None, :]
            on = tl.load(diagonal + row * stride, mask=row < n, other=0.0) * inverse
            value = tl.where(row < column, other, tl.where(row == column, on, value))
            put(out, wide, row, column, value, row < wide + 0 * column, side, PRECISE, DIRECT)
            row = j * TILE + tl.arange(0, TILE)[:, None]
            column = i * TILE + tl.arange(0, TILE)[None, :]
            mask = (row // TILE < column // TILE) & (column < wide)
            put(out, wide, row, column, other, mask, side, PRECISE, DIRECT)
    else:
        row = number * ROWS + tl.arange(0, ROWS)[:, None]
        on_diagonal = tl.load(diagonal + row * stride, mask=row < n, other=0.0) * inverse
        code_length = (n * BITS + 7) // 8
        scale_length = (n + BLOCK - 1) // BLOCK
        for start in range(0, wide, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            mask = (row < n) & (column < n)
            if BITS == 32:
                place = codes.to(tl.pointer_type(tl.float32)) + row * n + column
                value = tl.load(place, mask=mask, other=0.0) * inverse
            elif COMPACT:
                value = restore_by_rows(
                    codes.to(tl.pointer_type(tl.uint8)), scales.to(tl.pointer_type(tl.uint8)),
                    tops, table, squares, row, column, mask, n, True, BITS, BLOCK,
                )  # fmt: skip
                value = tl.where(mask, value * inverse, 0.0)
            elif WORDS:
                # Equivalent to restore, but reads eight codes as one word, and their scale once.
                word = start // 8 + tl.arange(0, COLUMNS // 8)[None, :]
                words_inside = (row < n) & (word < n // 8)
                base = codes.to(tl.pointer_type(tl.int32)) + row * (n // 8)
                eight = tl.load(base + word, mask=words_inside, other=0)
                place = row * scale_length + word * 8 // BLOCK
                place = scales.to(tl.pointer_type(tl.float32)) + place
                scale = tl.load(place, mask=words_inside, other=0.0) * inverse
                code = eight_codes(eight)
                value = tl.reshape(tl.load(table + code) * scale[:, :, None], (ROWS, COLUMNS))
            else:
                base = codes.to(tl.pointer_type(tl.uint8)) + row * code_length
                row_scales = scales.to(tl.pointer_type(tl.float32)) + row * scale_length
                value = restore(base, row_scales, table, column, mask, BITS, BLOCK)
                value = tl.where(mask, value * inverse, 0.0)
            if BITS < 32:
                value = tl.where(row != column, value, on_diagonal)
            inside = (row < wide) & (column < wide)
            put(out, wide, row, column, value, inside, side, PRECISE, DIRECT)


@triton.jit
def _inside(row, m, column, n, WIDE: tl.constexpr):
    """Return the mask of a block; WIDE: n is a multiple of 8."""
    mask = (row < m) & (column < n)
    return tl.max_constancy(mask, (1, 8)) if WIDE else mask


@triton.jit(do_not_specialize=["begin"])
def gather_kernel(
    programs, begin, blocks, addresses, buffers, anchor,
    PRECISE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy a strip of G into the scratch."""
    number = begin + tl.program_id(0)
    program = programs + number * 2
    line = blocks + tl.load(program) * LINE
    member = tl.load(line + MEMBER)
    address, kind = find(addresses, member)
    if address == 0:
        return
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    padded_m, padded_n = padded(m), padded(n)
    row = (number - tl.load(program + 1)) * ROWS + tl.arange(0, ROWS)[:, None]
    first, stride, taps = gradients.gradient_of(line, addresses, member, WIDE)
    unit = 1.0 if PRECISE else gradient_unit(buffers, member)
    out = scratch(anchor, buffers, tl.load(line + X))
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = gradients.place_of(first, stride, taps, row, column, WIDE)
        value = gradients.load(address, kind, place, _inside(row, m, column, n, WIDE), WIDE)
        inside = (row < padded_m) & (column < padded_n)
        place = out + row * padded_n + column
        keep(place, padded_m * padded_n, value * (1.0 / unit), inside, PRECISE)


@triton.jit(do_not_specialize=["begin"])
def scatter_kernel(
    programs, begin, blocks, addresses, buffers, scales,
    PRECISE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a strip of G̃ over the gradient."""
    number = begin + tl.program_id(0)
    program = programs + number * 2
    line = blocks + tl.load(program) * LINE
    member = tl.load(line + MEMBER)
    scale = tl.load(scales + member)
    if scale == LEAVE:
        return
    address, kind = find(addresses, member)
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    row = (number - tl.load(program + 1)) * ROWS + tl.arange(0, ROWS)[:, None]
    padded_m, padded_n = padded(m), padded(n)
    first, stride, taps = gradients.gradient_of(line, addresses, member, WIDE)
    stack = tl.load(buffers + HELD_STACK)
    source = tl.multiple_of(tl.load(line + HELD), PADDING) + row * padded_n
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < padded_m) & (column < padded_n)
        value = gradients.load(
            stack, FLOAT32 if PRECISE else BFLOAT16, source + column, inside, True
        )
        place = gradients.place_of(first, stride, taps, row, column, WIDE)
        gradients.store(address, kind, place, value * scale, _inside(row, m, column, n, WIDE), WIDE)


@triton.jit
def _dot(a, b, total):
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _multiply(
    a, a_size, a_step, b, b_size, b_step, depth, total, PRECISE: tl.constexpr, DEPTH: tl.constexpr
):
    """Add a product to the total. lo is ``size`` elements after hi; steps go along the depth."""
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
def _multiply_gradient(a, b, b_step, depth, total, DEPTH: tl.constexpr):
    """Add a product of rows of a gradient: a multiple of 8 elements each, without padding."""
    k = tl.arange(0, DEPTH)
    for start in range(0, depth, DEPTH):
        within = tl.max_constancy(start + k < depth, 8)
        total = _dot(tl.load(a, mask=within[None, :], other=0.0), tl.load(b), total)
        a += DEPTH
        b += b_step
    return total


@triton.jit(do_not_specialize=["first_square"])
def pass_kernel(
    programs, blocks, addresses, buffers, anchor, units, squares, first_square,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BY_LEFT: tl.constexpr, BY_RIGHT: tl.constexpr,
    PRECISE: tl.constexpr, DIRECT: tl.constexpr, LAST: tl.constexpr, COMPARE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one pass of the rule on a tile: L̂ X, or X R̂, or L̂ X + X R̂.

    The source is the gradient itself (DIRECT, only for X R̂), or in the scratch.

    The last pass also sums up squares of Ĝ. With COMPARE, it writes no Ĝ, but sums up ⟨a, b⟩,
    ⟨a, a⟩ and ⟨b, b⟩, where a is the computed Ĝ and b is the held Ĝ in bf16.
    """
    BOTH: tl.constexpr = BY_LEFT and BY_RIGHT
    program = tl.program_id(0)
    block = tl.load(programs + program * 2)
    first_tile = tl.load(programs + program * 2 + 1)
    # All fields are loaded before any is used, so that the latencies overlap.
    line = blocks + block * LINE
    member = tl.load(line + MEMBER)
    m, n = tl.load(line + M).to(tl.int32), tl.load(line + N).to(tl.int32)
    x = scratch(anchor, buffers, tl.load(line + SOURCE))
    left = scratch(anchor, buffers, tl.load(line + LEFT))
    right = scratch(anchor, buffers, tl.load(line + RIGHT))
    left_unit, right_unit = tl.load(units + block * 2), tl.load(units + block * 2 + 1)
    first, stride, _ = gradients.gradient_of(line, addresses, member, DIRECT)
    address, _ = find(addresses, member)
    if address == 0:
        if COMPARE:
            for i in tl.static_range(3):
                tl.store(squares + (first_square + program) * 3 + i, 0.0)
        elif LAST:
            tl.store(squares + first_square + program, 0.0)
        return
    padded_m, padded_n = padded(m), padded(n)
    tile, across = program - first_tile, tl.cdiv(n, TILE_N)
    row = tile // across * TILE_M + tl.arange(0, TILE_M)
    column = tile % across * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, DEPTH)
    # Rows beyond the padding wrap around: their results are never stored.
    x_row = row % padded_m
    x_column = tl.max_contiguous(tl.multiple_of(column % padded_n, PADDING), PADDING)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    size = padded_m * padded_n
    # Divisor of the first pass's result.
    room = 1.0 if PRECISE else _ROOM
    if BOTH:
        room *= tl.maximum(left_unit, right_unit)
    scale = room if LAST else 1.0 / room
    if BOTH:
        scale *= right_unit
    elif LAST:  # of both passes
        scale *= left_unit * right_unit
    if LAST and not PRECISE:
        scale *= gradient_unit(buffers, member)
    if DIRECT:
        scale /= gradient_unit(buffers, member)
    if BY_LEFT:
        total = _multiply(
            left + x_row[:, None] * padded_m + k[None, :], padded_m * padded_m, DEPTH,
            x + k[:, None] * padded_n + x_column[None, :], size, DEPTH * padded_n,
            padded_m, total, PRECISE, DEPTH,
        )  # fmt: skip
    if BOTH:
        total *= left_unit / right_unit
    if BY_RIGHT:
        if DIRECT:
            gradient = gradients.pointer_to(address, tl.bfloat16, True) + first
            total = _multiply_gradient(
                gradient + (row % m).to(tl.int64)[:, None] * stride + k[None, :],
                as_bf16(right) + k[:, None] * padded_n + x_column[None, :], DEPTH * padded_n,
                n, total, DEPTH,
            )  # fmt: skip
        else:
            total = _multiply(
                x + x_row[:, None] * padded_n + k[None, :], size, DEPTH,
                right + k[:, None] * padded_n + x_column[None, :], padded_n * padded_n,
                DEPTH * padded_n, padded_n, total, PRECISE, DEPTH,
            )  # fmt: skip
    total *= scale
    inside = (row < padded_m)[:, None] & (column < padded_n)[None, :]
    if not LAST:
        y = scratch(anchor, buffers, tl.load(line + TARGET))
        keep(y + row[:, None] * padded_n + column[None, :], size, total, inside, PRECISE)
    else:
        total = tl.where((row < m)[:, None] & (column < n)[None, :], total, 0.0)
        first = tl.multiple_of(tl.load(line + HELD), PADDING)
        place = first + row[:, None] * padded_n + column[None, :]
        stack = tl.load(buffers + HELD_STACK)
        if COMPARE:
            other = gradients.load(stack, BFLOAT16, place, inside, True)
            sums = squares + (first_square + program) * 3
            tl.store(sums, tl.sum(total * other))
            tl.store(sums + 1, tl.sum(total * total))
            tl.store(sums + 2, tl.sum(other * other))
        else:
            gradients.store(stack, FLOAT32 if PRECISE else BFLOAT16, place, total, inside, True)
            tl.store(squares + first_square + program, tl.sum(total * total))


@triton.jit(do_not_specialize=["begin"])
def graft_kernel(
    members, begin, addresses, buffers, squares, scales, ratios, ungrafted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ‖G‖ / ‖Ĝ‖ of a member, or LEAVE, to leave G unchanged."""
    line = members + (begin + tl.program_id(0)) * 3
    member, start, stop = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    address, _ = find(addresses, member)
    if address == 0:
        tl.store(scales + member, LEAVE)
        return
    total = gradients.sum_of(squares, start, stop, BLOCK)
    norm = tl.load(tl.load(buffers + NORMS).to(tl.pointer_type(tl.float32)) + member)
    scale = norm / (tl.sqrt(total) + 1e-12)
    tl.store(ratios + member, scale)
    finite = tl.abs(norm) < float("inf")  # False for NaN
    usable = (total < float("inf")) & (scale < float("inf"))
    # Where Ĝ overflowed although G is finite, the base optimizer gets G itself.
    tl.store(scales + member, tl.where(usable, scale, LEAVE))
    tl.atomic_add(ungrafted, tl.where(finite & (usable == 0), 1, 0).to(tl.int64))
