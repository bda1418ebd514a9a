"""Restore inverse roots of blocks into the scratch, each divided by a power of two."""

from __future__ import annotations

import triton
import triton.language as tl

from kronbit.kernels.compact import eight_codes, restore_by_rows, restore_tile, tile_at
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
    TOPS,
    M,
    keep,
    padded,
    root_unit,
    scratch,
)
from kronbit.kernels.quantization import restore

# Elements of tiles that a program restores; it also writes them mirrored.
_ELEMENTS = 4 * 64 * 64


def tiles_per_program(tile: int) -> int:
    """Return the number of tiles of a program; 0 if there are no tiles."""
    return _ELEMENTS // tile**2 if tile else 0


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
    unit = 1.0
    if not PRECISE:
        unit = root_unit(line, side, n)
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
                # As restore does, but eight codes are read as one word, and their scale once.
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
