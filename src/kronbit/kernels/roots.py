"""The roots of blocks, restored into the scratch, each divided by a power of two."""

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
    # All that the line says is asked for before anything depends on it: waiting adds up.
    member, n = tl.load(line + MEMBER), tl.load(line + M + side).to(tl.int32)
    codes = tl.load(line + CODES + side * TO_RIGHT)
    scales = tl.load(line + SCALES + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    out = scratch(anchor, buffers, tl.load(line + LEFT + side))
    address, _ = find(addresses, member)
    if address == 0:
        return
    wide = padded(n)
    unit = 1.0
    if not PRECISE:
        unit = root_unit(line, side, n)
    first = (tl.program_id(0) - tl.load(program + 2)) * ROWS
    tl.store(units + block * 2 + side, unit, mask=first == 0)
    inverse = 1.0 / unit
    row = first + tl.arange(0, ROWS)[:, None]
    diagonal = tl.load(line + DIAGONAL + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    own = diagonal + row * tl.load(line + DIAGONAL_STRIDE + side * TO_RIGHT)
    on_diagonal = tl.load(own, mask=row < n, other=0.0) * inverse
    code_length = (n * BITS + 7) // 8
    scale_length = (n + BLOCK - 1) // BLOCK
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
            code = (eight[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
            value = tl.reshape(tl.load(table + code) * scale[:, :, None], (ROWS, COLUMNS))
        else:
            base = codes.to(tl.pointer_type(tl.uint8)) + row * code_length
            value = restore(base, scales + row * scale_length, table, column, mask, BITS, BLOCK)
            value = tl.where(mask, value * inverse, 0.0)
        if BITS < 32:
            value = tl.where(row != column, value, on_diagonal)
        inside = (row < wide) & (column < wide)
        place = out + row * wide + column
        if DIRECT:
            if side == 1:
                tl.store(as_bf16(place), value.to(tl.bfloat16), mask=inside)
            else:
                tl.store(place, value.to(tl.float16), mask=inside)
        else:
            keep(place, wide * wide, value, inside, PRECISE)
