"""Gather rows of gradients into the scratch; scatter rows of G̃ over the gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from kronbit.kernels.gradients import BFLOAT16, FLOAT32, find, load, store
from kronbit.kernels.lines import (
    HELD,
    HELD_STACK,
    LINE,
    MEMBER,
    PADDING,
    M,
    N,
    X,
    gradient_of,
    gradient_unit,
    keep,
    padded,
    place_of,
    scratch,
)

# A scale with which scatter leaves the gradient as it is.
LEAVE = tl.constexpr(-1.0)


@triton.jit
def _inside(row, m, column, n, WIDE: tl.constexpr):
    """Return the mask of a block; WIDE: n is a multiple of 8."""
    mask = (row < m) & (column < n)
    if WIDE:
        mask = tl.max_constancy(mask, (1, 8))
    return mask


@triton.jit(do_not_specialize=["begin"])
def gather_kernel(
    programs, begin, blocks, addresses, buffers, anchor,
    PRECISE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy some rows of G into scratch."""
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
    first, stride, taps = gradient_of(line, addresses, member, WIDE)
    unit = 1.0
    if not PRECISE:
        unit = gradient_unit(buffers, member)
    out = scratch(anchor, buffers, tl.load(line + X))
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = place_of(first, stride, taps, row, column, WIDE)
        value = load(address, kind, place, _inside(row, m, column, n, WIDE), WIDE)
        inside = (row < padded_m) & (column < padded_n)
        place = out + row * padded_n + column
        keep(place, padded_m * padded_n, value * (1.0 / unit), inside, PRECISE)


@triton.jit(do_not_specialize=["begin"])
def scatter_kernel(
    programs, begin, blocks, addresses, buffers, scales,
    PRECISE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some rows of G̃ over the gradient."""
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
    first, stride, taps = gradient_of(line, addresses, member, WIDE)
    stack = tl.load(buffers + HELD_STACK)
    source = tl.multiple_of(tl.load(line + HELD), PADDING) + row * padded_n
    for start in range(0, padded_n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < padded_m) & (column < padded_n)
        value = load(stack, FLOAT32 if PRECISE else BFLOAT16, source + column, inside, True)
        place = place_of(first, stride, taps, row, column, WIDE)
        store(address, kind, place, value * scale, _inside(row, m, column, n, WIDE), WIDE)
