"""Block-wise quantisation in pure torch: the specification that every kernel must match.

Everything acts along the last axis, so slicing, batching and sharding of leading axes commute
with it. No temporary is larger than twice the float32 input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kronbit.quantization.mappings import CODEBOOKS, THRESHOLDS


class CodeFormat(NamedTuple):
    """Bits b (below 32), mapping R, and block size."""

    bits: int
    mapping: str
    block_size: int


# Codes are packed as a little-endian bit stream. A word is the shortest run of codes that fills
# whole bytes: bits -> (codes in a word, bytes in a word).
WORD = {8: (1, 1), 6: (4, 3), 4: (2, 1), 3: (8, 3)}

# Scales may be quantised in the same way as values.
SCALE_BITS, SCALE_MAPPING, SCALES_PER_TOP = 8, "squares", 256


def packed_length(length: int, bits: int) -> int:
    """Return the bytes of a row of ``length`` codes: each row is padded to whole bytes."""
    return -(-length * bits // 8)


def block_count(length: int, block_size: int) -> int:
    """Return the number of blocks, and so of scales, of a row; the last block may be short."""
    return -(-length // block_size)


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[-1] % multiple
    return functional.pad(x, (0, missing)) if missing else x


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int32 codes of the last axis into bytes; an even 4-bit code is the low half."""
    per_word, width = WORD[bits]
    length = packed_length(codes.shape[-1], bits)
    parts = _padded(codes, per_word).unflatten(-1, (-1, per_word))
    word = parts[..., 0]
    for i in range(1, per_word):
        word = word | (parts[..., i] << (bits * i))
    # A cast to uint8 keeps the lowest byte.
    packed = torch.stack([(word >> (8 * k)).to(torch.uint8) for k in range(width)], dim=-1)
    return packed.flatten(-2)[..., :length].contiguous()


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Return the int32 codes of a packed last axis."""
    per_word, width = WORD[bits]
    parts = _padded(packed, width).unflatten(-1, (-1, width))
    word = parts[..., 0].to(torch.int32)
    for k in range(1, width):
        word |= parts[..., k].to(torch.int32) << (8 * k)
    codes: Tensor = word.new_empty(*word.shape, per_word)
    for i in range(per_word):
        codes[..., i] = (word >> (bits * i)) & (2**bits - 1)
    return codes.flatten(-2)[..., :length]


def _blocks(x: Tensor, block_size: int) -> list[Tensor]:
    """Return views (..., blocks, elements) of the last axis: whole blocks, then a short one."""
    whole = x.shape[-1] // block_size * block_size
    parts = (x[..., :whole].unflatten(-1, (-1, block_size)), x[..., whole:].unsqueeze(-2))
    return [part for part in parts if part.shape[-1] * part.shape[-2]]


def _with_scales(x: Tensor, scales: Tensor, block_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each view of ``_blocks`` with the scales of its blocks."""
    start = 0
    for block in _blocks(x, block_size):
        yield block, scales[..., start : start + block.shape[-2]].unsqueeze(-1)
        start += block.shape[-2]


def quantize(x: Tensor, bits: int, mapping: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Q: normalise each block by its largest absolute value, take the nearest code, pack.

    Args:
        x: float32 values (..., n).
        bits: b, below 32.
        mapping: R.
        block_size: Elements that share one scale.

    Returns:
        codes: uint8 (..., ceil(n bits / 8)).
        scales: float32 (..., ceil(n / block_size)).
    """
    scales = block_scales(x, block_size)
    return nearest_codes(x, scales, bits, mapping, block_size), scales


def block_scales(x: Tensor, block_size: int) -> Tensor:
    """Return the largest absolute value of each block: (..., n) -> (..., ceil(n / block_size))."""
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], block_count(x.shape[-1], block_size))
    scales = [
        torch.linalg.vector_norm(block, ord=torch.inf, dim=-1) for block in _blocks(x, block_size)
    ]
    return torch.cat(scales, dim=-1)


def nearest_codes(x: Tensor, scales: Tensor, bits: int, mapping: str, block_size: int) -> Tensor:
    """Return packed codes of values divided by their block's scale, which may have been rounded."""
    if x.numel() == 0:
        length = packed_length(x.shape[-1], bits)
        return x.new_empty(*x.shape[:-1], length, dtype=torch.uint8)
    x = x.clone(memory_format=torch.contiguous_format)
    for block, scale in _with_scales(x, scales, block_size):
        block.div_(torch.where(scale == 0, 1.0, scale))
    return pack(torch.bucketize(x, THRESHOLDS[mapping, bits, x.device], out_int32=True), bits)


def quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Q: return scales (..., n) as one byte each, and the largest of every 256 as float32."""
    return quantize(scales, SCALE_BITS, SCALE_MAPPING, SCALES_PER_TOP)


def dequantize_scales(codes: Tensor, tops: Tensor) -> Tensor:
    """D: restore the result of ``quantize_scales``."""
    return dequantize(codes, tops, SCALE_BITS, SCALE_MAPPING, SCALES_PER_TOP, codes.shape[-1])


def dequantize(
    codes: Tensor, scales: Tensor, bits: int, mapping: str, block_size: int, length: int
) -> Tensor:
    """D: look the codes up and multiply each block by its scale; float32 (..., length)."""
    index = unpack(codes, bits, length)
    table = CODEBOOKS[mapping, bits, codes.device]
    values = table.index_select(0, index.reshape(-1)).view(index.shape)
    for block, scale in _with_scales(values, scales, block_size):
        block.mul_(scale)
    return values
