"""The products of the ordinary step, Ĝ = L̂ G R̂, for blocks of all shapes at once, and grafting.

The ordinary step updates no statistic: it only preconditions gradients G by the inverse roots L̂ and
R̂. Every block is a line of integers (``lines``): where its gradient, its roots and its scratch are.
A list names the block of every program, and the first program of that block. So the number of
launches does not grow with the number of parameters or shapes.

A table holds the addresses of gradients (``kernels.gradients``), another those of the step's
buffers, so a captured graph stays valid although they move.

Products multiply float16 and add in float32. Operands are divided by powers of two
(``lines.gradient_unit``, ``lines.root_unit``) that keep them in float16's range. A gradient in bf16
can be an operand as it is (DIRECT); R̂, which it is multiplied with first, is in bf16 then. Where
float16 is not accurate enough (PRECISE), every operand is a sum of two bf16 numbers, hi + lo, and
the tensor cores multiply both: 16 bits, and no units.

Scratch is padded to multiples of ``PAD`` with zeros, so loads of products need no masks. (With
DIRECT, padding rows of G R̂ repeat other rows; L̂ has zeros there.)
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from kronbit.kernels.gradients import BFLOAT16, FLOAT32, find, load, pointer_to, store
from kronbit.kernels.lines import (
    HELD,
    HELD_STACK,
    LEFT,
    LINE,
    MEMBER,
    NORMS,
    PADDING,
    RIGHT,
    M,
    N,
    gradient_of,
    gradient_unit,
    keep,
    padded,
    scratch,
)
from kronbit.kernels.roots import as_bf16
from kronbit.kernels.strips import LEAVE

# Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
_WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Results between passes are divided by this. Sums of n products of numbers up to 1 and numbers of
# norm 2¹⁵ stay below 2¹⁵ √n; two sums are added.
_ROOM = tl.constexpr(256.0)


@triton.jit
def _dot(a, b, total):
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _multiply(
    a, a_size, a_step, b, b_size, b_step, depth, total, PRECISE: tl.constexpr, DEPTH: tl.constexpr
):
    """Add a product to the total. lo is ``size`` elements after hi; ``step`` goes along depth."""
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
    """Add a product by rows of a gradient, of multiples of 8 elements, but without padding."""
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

    The last pass also sums up squares of Ĝ. Or it writes nothing (COMPARE), and sums up ⟨a, b⟩,
    ⟨a, a⟩ and ⟨b, b⟩, where a is its Ĝ and b is the held Ĝ in bf16.
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
    first, stride, _ = gradient_of(line, addresses, member, DIRECT)
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
            gradient = pointer_to(address, tl.bfloat16, True) + first
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
            other = load(stack, BFLOAT16, place, inside, True)
            sums = squares + (first_square + program) * 3
            tl.store(sums, tl.sum(total * other))
            tl.store(sums + 1, tl.sum(total * total))
            tl.store(sums + 2, tl.sum(other * other))
        else:
            store(stack, FLOAT32 if PRECISE else BFLOAT16, place, total, inside, True)
            tl.store(squares + first_square + program, tl.sum(total * total))


@triton.jit(do_not_specialize=["begin"])
def graft_kernel(
    members, begin, addresses, buffers, squares, scales, ratios, ungrafted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ‖G‖ / ‖Ĝ‖ of a member, or LEAVE, with which scatter leaves G as it is."""
    line = members + (begin + tl.program_id(0)) * 3
    member, start, stop = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    address, _ = find(addresses, member)
    if address == 0:
        tl.store(scales + member, LEAVE)
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
    # Where Ĝ overflowed although G is finite, the base optimizer gets G itself.
    tl.store(scales + member, tl.where(usable, scale, LEAVE))
    tl.atomic_add(ungrafted, tl.where(finite & (usable == 0), 1, 0).to(tl.int64))
