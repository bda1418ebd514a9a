"""The roots of blocks, restored into the scratch.

Most of a root is its diagonal, and that takes part in products as if it had not been rounded: rows
of L̂ X and columns of X R̂ are multiplied by what rounding has changed it by (``repair``). The other
elements get that error, too; but of them, it is no more than their own rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kronbit.kernels.gradients import find
from kronbit.kernels.lines import (
    CODES,
    DIAGONAL,
    DIAGONAL_STRIDE,
    LEFT,
    LINE,
    MEMBER,
    SCALES,
    TO_RIGHT,
    M,
    keep,
    padded,
    root_unit,
    scratch,
)
from kronbit.quantization.triton import restore


@triton.jit
def as_bf16(pointer):
    """A pointer into the scratch, where it holds bf16 numbers."""
    return pointer.to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def _diagonal(line, side, i, n):
    """Elements of the diagonal of a root; zero beyond its end."""
    diagonal = tl.load(line + DIAGONAL + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    stride = tl.load(line + DIAGONAL_STRIDE + side * TO_RIGHT)
    return tl.load(diagonal + i * stride, mask=i < n, other=0.0)


@triton.jit
def repair(line, side, i, n, unit, PRECISE: tl.constexpr, BF16: tl.constexpr):
    """What makes the diagonal of a root out of what scratch holds of it."""
    diagonal = _diagonal(line, side, i, n)
    kept = diagonal * (1.0 / unit)
    if PRECISE:
        high = kept.to(tl.bfloat16).to(tl.float32)
        kept = high + (kept - high).to(tl.bfloat16).to(tl.float32)
    elif BF16:
        kept = kept.to(tl.bfloat16).to(tl.float32)
    else:
        kept = kept.to(tl.float16).to(tl.float32)
    return tl.where(kept == 0, unit, diagonal / kept)


@triton.jit
def _decoded(eight, scale, table, NUMBER: tl.constexpr):
    """One of the eight codes in each word, restored."""
    return tl.load(table + ((eight >> (4 * NUMBER)) & 15)) * scale


@triton.jit
def _decoded_words(eight, scale, table, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """All codes of (ROWS, COLUMNS / 8) words. Joined pairwise, they never leave their threads."""
    even = tl.join(
        tl.join(_decoded(eight, scale, table, 0), _decoded(eight, scale, table, 4)),
        tl.join(_decoded(eight, scale, table, 2), _decoded(eight, scale, table, 6)),
    )
    odd = tl.join(
        tl.join(_decoded(eight, scale, table, 1), _decoded(eight, scale, table, 5)),
        tl.join(_decoded(eight, scale, table, 3), _decoded(eight, scale, table, 7)),
    )
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))


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
    DIRECT: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Restore some rows of a root."""
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
    inverse = 1.0 / unit
    diagonal = _diagonal(line, side, row, n) * inverse
    code_length = (n * BITS + 7) // 8
    scale_length = (n + BLOCK - 1) // BLOCK
    out = scratch(anchor, buffers, tl.load(line + LEFT + side))
    for start in range(0, wide, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = (row < n) & (column < n)
        if BITS == 32:
            place = codes.to(tl.pointer_type(tl.float32)) + row * n + column
            value = tl.load(place, mask=mask, other=0.0) * inverse
        elif WORDS:
            # As restore does, but eight codes are read as one word, and their scale once.
            word = start // 8 + tl.arange(0, COLUMNS // 8)[None, :]
            known = (row < n) & (word < n // 8)
            base = codes.to(tl.pointer_type(tl.int32)) + row * (n // 8)
            eight = tl.load(base + word, mask=known, other=0)
            place = row * scale_length + word * 8 // BLOCK
            scale = tl.load(scales + place, mask=known, other=0.0) * inverse
            value = _decoded_words(eight, scale, table, ROWS, COLUMNS)
            value = tl.where(row != column, value, diagonal)
        else:
            base = codes.to(tl.pointer_type(tl.uint8)) + row * code_length
            value = restore(base, scales + row * scale_length, table, column, mask, BITS, BLOCK)
            value = tl.where(mask, value * inverse, 0.0)
            value = tl.where(row != column, value, diagonal)
        inside = (row < wide) & (column < wide)
        place = out + row * wide + column
        if DIRECT:
            if side == 1:
                tl.store(as_bf16(place), value.to(tl.bfloat16), mask=inside)
            else:
                tl.store(place, value.to(tl.float16), mask=inside)
        else:
            keep(place, wide * wide, value, inside, PRECISE)
