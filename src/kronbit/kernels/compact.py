"""Compact storage by Triton kernels: the same codes as pure torch, from matrices of any strides.

Every program handles a run of blocks, one below the other: the blocks of a tile, or 16 blocks if a
matrix is stored by rows. The scales of blocks are quantised, too; the scales of scales are tops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch
from kronbit.kernels.quantization import (
    block_scale,
    code_at,
    nearest_code,
    offset_of,
    store_packed,
    strides,
)
from kronbit.quantization import reference
from kronbit.quantization.mappings import codebook, thresholds
from kronbit.quantization.reference import SCALE_BITS, SCALE_MAPPING, CodeFormat, block_count

_PER_TOP = tl.constexpr(reference.SCALES_PER_TOP)
_BY_ROWS = 16


@triton.jit
def tile_at(number):
    """Return row and column of a tile of the lower triangle, counted by rows."""
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)  # the square root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    return i, number - i * (i + 1) // 2


@triton.jit
def restored_scale(scales, tops, squares, place, mask):
    """D: return the scales of blocks."""
    code = tl.load(scales + place, mask=mask, other=0).to(tl.int32)
    return tl.load(squares + code) * tl.load(tops + place // _PER_TOP, mask=mask, other=0.0)


@triton.jit
def eight_codes(words):
    """Return the 4-bit codes of words (rows, columns) along a third axis."""
    return (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15


@triton.jit
def restore_tile(
    codes, scales, tops, table, squares, tile, count, BITS: tl.constexpr, TILE: tl.constexpr
):
    """D: return a tile, (TILE, TILE); zero after the last of ``count`` rows of tiles."""
    line = tile * TILE + tl.arange(0, TILE)[:, None]
    scale = restored_scale(scales, tops, squares, line, line < count)
    if BITS == 4:  # eight codes are read as one word
        part = tl.arange(0, TILE // 8)[None, :]
        words = codes.to(tl.pointer_type(tl.int32)) + line * (TILE // 8) + part
        code = eight_codes(tl.load(words, mask=line + 0 * part < count, other=0))
        code = tl.reshape(code, (TILE, TILE))
    else:
        column = tl.arange(0, TILE)[None, :]
        rows = codes.to(tl.pointer_type(tl.uint8)) + line * (TILE * BITS // 8)
        code = code_at(rows, column, line + 0 * column < count, BITS)
    return tl.load(table + code) * scale


@triton.jit
def restore_by_rows(
    codes, scales, tops, table, squares, row, column, mask, n,
    TRIANGLE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """D: return elements of a matrix that is stored by rows; a TRIANGLE is mirrored."""
    if TRIANGLE:
        row, column = tl.maximum(row, column), tl.minimum(row, column)
    blocks = (n + BLOCK - 1) // BLOCK
    code = code_at(codes + row * ((n * BITS + 7) // 8), column, mask, BITS)
    scale = restored_scale(scales, tops, squares, row * blocks + column // BLOCK, mask)
    return tl.load(table + code) * scale


@triton.jit
def _run(
    number, n, TRIANGLE: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr
):
    """Return a run's rows, columns, mask of elements that count, blocks, and mask of blocks."""
    if TILED:
        i, j = tile_at(number)
        row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
        line = number * BLOCK + tl.arange(0, BLOCK)
        stored = line >= 0
    else:
        blocks = (n + BLOCK - 1) // BLOCK
        row = number // blocks * ROWS + tl.arange(0, ROWS)
        column = number % blocks * BLOCK + tl.arange(0, BLOCK)
        line = row * blocks + number % blocks
        stored = row < n
    counts = (row < n)[:, None] & (column < n)[None, :]
    if TRIANGLE:
        counts = counts & (column[None, :] < row[:, None])
    return row, column, counts, line, stored


@triton.jit
def _value(x, matrix_stride, long_stride, row, column, counts, TRANSPOSED: tl.constexpr):
    x += tl.program_id(1).to(tl.int64) * matrix_stride
    return tl.load(x + offset_of(row, column, long_stride, TRANSPOSED), mask=counts, other=0.0)


@triton.jit(do_not_specialize=["n", "count", "matrix_stride", "long_stride"])
def _scales_kernel(
    x, scales, n, count, matrix_stride, long_stride, TRANSPOSED: tl.constexpr,
    TRIANGLE: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, counts, line, stored = _run(tl.program_id(0), n, TRIANGLE, BLOCK, TILED, ROWS)
    value = _value(x, matrix_stride, long_stride, row, column, counts, TRANSPOSED)
    target = scales + tl.program_id(1).to(tl.int64) * count + line
    tl.store(target, block_scale(value), mask=stored)


@triton.jit(do_not_specialize=["count", "tops_count"])
def _round_scales_kernel(
    scales, codes, tops, borders, squares, count, tops_count, BITS: tl.constexpr
):
    """Quantise the scales that share a top, and overwrite them by their dequantised values."""
    matrix = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * _PER_TOP + tl.arange(0, _PER_TOP)[None, :]
    mask = place < count
    scales += matrix * count
    value = tl.load(scales + place, mask=mask, other=0.0)
    top = block_scale(value)
    code = nearest_code(value, top, borders, BITS)
    tl.store(codes + matrix * count + place, code.to(tl.uint8), mask=mask)
    tl.store(scales + place, tl.load(squares + code) * top[:, None], mask=mask)
    first = tops + matrix * tops_count + tl.program_id(0) + tl.arange(0, 1)
    tl.store(first, top)


@triton.jit(do_not_specialize=["n", "count", "code_length", "matrix_stride", "long_stride"])
def _codes_kernel(
    x, scales, codes, borders, n, count, code_length, matrix_stride, long_stride,
    TRANSPOSED: tl.constexpr, TRIANGLE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    TILED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, counts, line, stored = _run(tl.program_id(0), n, TRIANGLE, BLOCK, TILED, ROWS)
    value = _value(x, matrix_stride, long_stride, row, column, counts, TRANSPOSED)
    matrix = tl.program_id(1).to(tl.int64)
    scale = tl.load(scales + matrix * count + line, mask=stored, other=0.0)
    code = nearest_code(value, scale, borders, BITS)
    BYTES: tl.constexpr = BLOCK * BITS // 8
    if TILED:
        codes += matrix * (count * BYTES) + line.to(tl.int64) * BYTES
        store_packed(codes, code, 0, BYTES, stored, BITS, BLOCK)
    else:
        # Beyond the end of a row, bits are 0, which is not the code of zero.
        code = tl.where((column < n)[None, :], code, 0)
        codes += matrix * (n * code_length) + row.to(tl.int64) * code_length
        byte = tl.min(column // BLOCK * BYTES)
        store_packed(codes, code, byte, code_length, stored, BITS, BLOCK)


@triton.jit(do_not_specialize=["n", "count", "tops_count", "matrix_stride", "row_stride"])
def _decode_kernel(
    codes, scales, tops, diagonal, table, squares, out, n, count, tops_count, matrix_stride,
    row_stride, MIRRORED: tl.constexpr, TRIANGLE: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    matrix, number = tl.program_id(1).to(tl.int64), tl.program_id(0)
    scales += matrix * count
    tops += matrix * tops_count
    out += matrix * matrix_stride
    if TILED:
        i, j = tile_at(number)
        place = tl.arange(0, BLOCK)
        first = codes + matrix * count * (BLOCK * BITS // 8)
        value = restore_tile(first, scales, tops, table, squares, number, count, BITS, BLOCK)
        other = tl.trans(value) if MIRRORED else tl.zeros_like(value)
        # A tile on the diagonal has elements of both triangles.
        row, column = i * BLOCK + place[:, None], j * BLOCK + place[None, :]
        value = tl.where(row < column, other, value)
        on = tl.load(diagonal + matrix * n + row, mask=row < n, other=0.0)
        value = tl.where(row == column, on, value)
        tl.store(out + row * row_stride + column, value, mask=(row < n) & (column < n))
        row, column = j * BLOCK + place[:, None], i * BLOCK + place[None, :]
        mask = (row // BLOCK < column // BLOCK) & (column < n)
        tl.store(out + row * row_stride + column, other, mask=mask)
    else:
        blocks = (n + BLOCK - 1) // BLOCK
        row = (number // blocks * ROWS + tl.arange(0, ROWS))[:, None]
        column = (number % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
        mask = (row < n) & (column < n)
        first = codes + matrix * n * ((n * BITS + 7) // 8)
        value = restore_by_rows(
            first, scales, tops, table, squares, row, column, mask, n, TRIANGLE, BITS, BLOCK
        )
        if TRIANGLE:
            if not MIRRORED:
                value = tl.where(row < column, 0.0, value)
            on = tl.load(diagonal + matrix * n + row, mask=row < n, other=0.0)
            value = tl.where(row == column, on, value)
        tl.store(out + row * row_stride + column, value, mask=mask)


def block_scales(X: Tensor, triangle: bool, block: int, tiled: bool) -> Tensor:
    """Return the largest magnitude of each block: (k, blocks); see ``encode_triangle``."""
    k, n, _ = X.shape
    runs, count, constants = _runs(n, triangle, block, tiled)
    scales = torch.empty(k, count, dtype=torch.float32, device=X.device)
    arguments = X, scales, n, count, *strides(X)
    launch(_scales_kernel, (runs, k), *arguments, TRANSPOSED=X.stride(2) != 1, **constants)
    return scales


def round_scales_(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise scales (k, blocks) to codes and tops; overwrite the scales by D of the result."""
    k, count = scales.shape
    codes = torch.empty(k, count, dtype=torch.uint8, device=scales.device)
    tops = scales.new_empty(k, block_count(count, reference.SCALES_PER_TOP))
    tables = (f(SCALE_MAPPING, SCALE_BITS, scales.device) for f in (thresholds, codebook))
    arguments = scales, codes, tops, *tables, count, tops.shape[1]
    launch(_round_scales_kernel, (tops.shape[1], k), *arguments, BITS=SCALE_BITS)
    return codes, tops


def nearest_codes(
    X: Tensor, scales: Tensor, triangle: bool, code_format: CodeFormat, tiled: bool
) -> Tensor:
    """Return packed codes of (k, n, n) with given scales; see ``block_scales``."""
    (k, n, _), (bits, mapping, block) = X.shape, code_format
    runs, count, constants = _runs(n, triangle, block, tiled)
    length = reference.packed_length(block if tiled else n, bits)
    shape = (count // block, block) if tiled else (n,)
    codes = torch.empty(k, *shape, length, dtype=torch.uint8, device=X.device)
    arguments = X, scales, codes, thresholds(mapping, bits, X.device), n, count, length
    constants |= {"BITS": bits, "TRANSPOSED": X.stride(2) != 1}
    launch(_codes_kernel, (runs, k), *arguments, *strides(X), **constants)
    return codes


def encode(
    X: Tensor, triangle: bool, code_format: CodeFormat, tiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Q: return codes, codes of the scales, and tops; see ``linalg.backend``."""
    kept = block_scales(X, triangle, code_format.block_size, tiled)
    scales, tops = round_scales_(kept)
    # The codes are nearest for the stored scales, not for the exact ones.
    return nearest_codes(X, kept, triangle, code_format, tiled), scales, tops


def decode(
    codes: Tensor,
    scales: Tensor,
    tops: Tensor,
    diagonal: Tensor | None,
    mirrored: bool,
    code_format: CodeFormat,
    out: Tensor | None = None,
) -> Tensor:
    """D: restore the result of ``encode``; see ``linalg.backend``."""
    tiled, (bits, mapping, block_size) = codes.dim() == 4, code_format
    k, n = codes.shape[:2] if diagonal is None else diagonal.shape
    if out is None:
        out = torch.empty(k, n, n, dtype=torch.float32, device=codes.device)
    runs, count, constants = _runs(n, diagonal is not None, block_size, tiled)
    device = codes.device
    tables = codebook(mapping, bits, device), codebook(SCALE_MAPPING, SCALE_BITS, device)
    tensors = codes, scales, tops, tops if diagonal is None else diagonal, *tables, out
    numbers = n, count, tops.shape[1], *out.stride()[:2]
    launch(_decode_kernel, (runs, k), *tensors, *numbers, MIRRORED=mirrored, BITS=bits, **constants)
    return out


def _runs(n: int, triangle: bool, block: int, tiled: bool) -> tuple[int, int, dict[str, int]]:
    """Return the numbers of runs and of blocks of a matrix, and the constants of the kernels."""
    constants = {"TRIANGLE": triangle, "BLOCK": block, "TILED": tiled, "ROWS": _BY_ROWS}
    side = block_count(n, block)
    tiles = side * (side + 1) // 2
    if tiled:
        return tiles, tiles * block, constants
    return -(-n // _BY_ROWS) * side, n * side, constants
