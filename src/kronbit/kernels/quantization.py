"""The quantiser as Triton kernels, on rows of square matrices: the same codes as ``reference``.

Strides are arbitrary, so eigenvectors, which are columns, are quantised without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch
from kronbit.kernels.split import Split, empty_split, store_parts
from kronbit.quantization.mappings import codebook, thresholds
from kronbit.quantization.reference import CodeFormat, block_count, packed_length

_ROWS, _COLUMNS = 16, 256  # rows per program; columns per program that restores


@triton.jit
def code_at(codes, columns, mask, BITS: tl.constexpr):
    """Load the codes of columns of rows; ``codes`` points at the first code of each row."""
    bit = columns * BITS
    word = tl.load(codes + bit // 8, mask=mask, other=0).to(tl.int32)
    shift = bit % 8
    if 8 % BITS != 0:  # a code may reach into the next byte
        more = mask & (shift + BITS > 8)
        word |= tl.load(codes + bit // 8 + 1, mask=more, other=0).to(tl.int32) << 8
    return (word >> shift) & (2**BITS - 1)


@triton.jit
def restore(codes, scales, table, columns, mask, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """D: restore columns of rows; ``codes`` and ``scales`` point at the beginning of each row."""
    code = code_at(codes, columns, mask, BITS)
    scale = tl.load(scales + columns // BLOCK, mask=mask, other=0.0)
    return tl.load(table + code) * scale


@triton.jit
def offset_of(row, column, long_stride, TRANSPOSED: tl.constexpr):
    """Return offsets of elements; columns are contiguous if TRANSPOSED, else rows."""
    row, column = row[:, None], column[None, :]
    return row + column * long_stride if TRANSPOSED else row * long_stride + column


@triton.jit
def block_scale(value):
    """Return the largest magnitude of each row of values; every row is a block."""
    # tl.max ignores NaN: replace it by infinity, so that the scale is not finite either.
    return tl.max(tl.where(value == value, tl.abs(value), float("inf")), axis=1)


@triton.jit
def nearest_code(value, scale, borders, BITS: tl.constexpr):
    """Return the codes of values (rows, columns); every row is a block with a scale."""
    # Divide as IEEE does: an approximate division would move values across a border.
    value = tl.div_rn(value, tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros_like(value))
    # The code is the number of borders below the value. Compare with each border, or bisect.
    code = tl.zeros(value.shape, dtype=tl.int32)
    if BITS <= 4:
        for i in tl.static_range(2**BITS - 1):
            code += (value > tl.load(borders + i)).to(tl.int32)
    else:
        for i in tl.static_range(BITS):
            border = tl.load(borders + code + (2 ** (BITS - 1 - i) - 1))
            code = tl.where(value > border, code + 2 ** (BITS - 1 - i), code)
    return code


@triton.jit
def store_packed(target, code, first, length, stored, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Pack codes of blocks into rows of ``length`` bytes, from byte ``first`` on."""
    BYTES: tl.constexpr = 3 if 8 % BITS else 1  # the shortest word of whole codes
    PER_WORD: tl.constexpr = BYTES * 8 // BITS
    rows: tl.constexpr = code.shape[0]
    words: tl.constexpr = code.shape[1] // PER_WORD
    part = tl.arange(0, PER_WORD)[None, None, :]
    word = tl.sum(tl.reshape(code, (rows, words, PER_WORD)) << (part * BITS), axis=2)
    number = tl.arange(0, words)
    for k in tl.static_range(BYTES):
        inside = number * BYTES + k
        byte = first + inside
        mask = stored[:, None] & ((inside < BLOCK * BITS // 8) & (byte < length))[None, :]
        packed = ((word >> (8 * k)) & 255).to(tl.uint8)
        tl.store(target[:, None] + byte[None, :], packed, mask=mask)


@triton.jit(do_not_specialize=["first", "n", "order", "padded", "code_length", "scale_length"])
def _decode_kernel(
    codes, scales, diagonal, table, out, out_lo, out_unit, first, n, order, padded, code_length,
    scale_length, BITS: tl.constexpr, BLOCK: tl.constexpr, DIAGONAL: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < n) & (column < n)
    line = matrix * n + row
    x = restore(
        codes + line * code_length, scales + line * scale_length, table, column, mask, BITS, BLOCK
    )
    if DIAGONAL:
        x = tl.where(row == column, tl.load(diagonal + line, mask=row < n, other=0.0), x)
    if PARTS:
        x = tl.where(mask, x, tl.where((row == column) & (row < order), 1.0, 0.0)) * 4096.0
        matrix += first
        place = (matrix * padded + row) * padded + column
        store_parts(out, out_lo, place, x, (row < padded) & (column < padded))
        corner = tl.program_id(0) + tl.program_id(1) == 0
        tl.store(out_unit + matrix, 1.0 / 4096.0, mask=corner)
    else:
        tl.store(out + line * n + column, x, mask=mask)


@triton.jit(do_not_specialize=["n", "code_length", "scale_length", "matrix_stride", "long_stride"])
def _encode_kernel(
    x, codes, scales, diagonal, borders, n, code_length, scale_length, matrix_stride, long_stride,
    TRANSPOSED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    DIAGONAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    block = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, WIDE)
    column = block * BLOCK + place
    mask = (row < n)[:, None] & ((place < BLOCK) & (column < n))[None, :]
    offset = offset_of(row, column, long_stride, TRANSPOSED)
    value = tl.load(x + matrix * matrix_stride + offset, mask=mask, other=0.0)
    line = matrix * n + row
    if DIAGONAL:
        on = row[:, None] == column[None, :]
        tl.store(diagonal + line[:, None] + 0 * column[None, :], value, mask=on & mask)
        value = tl.where(on, 0.0, value)
    scale = block_scale(value)
    tl.store(scales + line * scale_length + block, scale, mask=row < n)
    code = tl.where(mask, nearest_code(value, scale, borders, BITS), 0)
    first = block * (BLOCK * BITS // 8)
    store_packed(codes + line * code_length, code, first, code_length, row < n, BITS, BLOCK)


def decode(
    codes: Tensor, scales: Tensor, diagonal: Tensor | None, code_format: CodeFormat
) -> Tensor:
    """D: restore contiguous codes and scales (k, n, ...); see ``linalg.backend``."""
    k, n = codes.shape[:2]
    out = torch.empty(k, n, n, dtype=torch.float32, device=codes.device)
    _decode(codes, scales, diagonal, (out,) * 3, 0, n, n, code_format)
    return out


def decode_operand(
    stacks: Sequence[tuple[Tensor, Tensor]], order: int, code_format: CodeFormat
) -> Split:
    """D: restore stacks as one operand; no element may be far above 1. See ``linalg.backend``."""
    shape = sum(len(codes) for codes, _ in stacks), order, order
    out = empty_split(shape, stacks[0][0].device)
    first, side = 0, out.hi.shape[-1]
    for codes, scales in stacks:
        _decode(codes, scales, None, out[:3], first, order, side, code_format)
        first += len(codes)
    return out


def _decode(
    codes: Tensor,
    scales: Tensor,
    diagonal: Tensor | None,
    out: tuple[Tensor, ...],
    first: int,
    order: int,
    side: int,
    code_format: CodeFormat,
) -> None:
    (k, n), (bits, mapping, block_size) = codes.shape[:2], code_format
    table = codebook(mapping, bits, codes.device)
    tensors = codes, scales, scales if diagonal is None else diagonal, table, *out
    numbers = first, n, order, side, codes.shape[-1], scales.shape[-1]
    constants = {"BITS": bits, "BLOCK": block_size, "DIAGONAL": diagonal is not None}
    constants |= {"PARTS": out[0].dtype == torch.float16, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    grid = -(-side // _ROWS), -(-side // _COLUMNS), k
    launch(_decode_kernel, grid, *tensors, *numbers, **constants)


def encode(
    X: Tensor, diagonal: bool, code_format: CodeFormat
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q: return codes, scales and diagonal of a stack, maybe transposed; see ``linalg.backend``."""
    (k, n, _), (bits, mapping, block_size) = X.shape, code_format
    codes = torch.empty(k, n, packed_length(n, bits), dtype=torch.uint8, device=X.device)
    scales = torch.empty(k, n, block_count(n, block_size), dtype=torch.float32, device=X.device)
    diagonals = torch.empty(k, n, dtype=torch.float32, device=X.device) if diagonal else None
    tensors = X, codes, scales, scales if diagonals is None else diagonals
    numbers = n, codes.shape[-1], scales.shape[-1], *strides(X)
    constants = {"TRANSPOSED": X.stride(2) != 1, "BITS": bits, "BLOCK": block_size}
    constants |= {"WIDE": triton.next_power_of_2(block_size), "DIAGONAL": diagonal, "ROWS": _ROWS}
    grid, borders = (-(-n // _ROWS), scales.shape[-1], k), thresholds(mapping, bits, X.device)
    launch(_encode_kernel, grid, *tensors, borders, *numbers, **constants)
    return codes, scales, diagonals


def strides(X: Tensor) -> tuple[int, int]:
    """Return the strides between matrices, and between their rows (columns if transposed)."""
    return X.stride(0), X.stride(1) if X.stride(2) == 1 else X.stride(2)
