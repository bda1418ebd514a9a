"""A table of addresses through which kernels reach gradients, which move from step to step.

An entry is the address of a gradient, with its kind and memory order in bits that addresses leave
free; 0 if there is no gradient. A convolution's weight has rows of (input, tap), or of (tap, input)
in channels-last order.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ORDER_AT, KIND_FROM = 59, 60  # bit of the memory order, and first bit of the kind
CHANNELS_LAST = 1 << _ORDER_AT  # added to an entry whose gradient is channels-last
_KIND = tl.constexpr(KIND_FROM)
_CHANNELS_LAST = tl.constexpr(CHANNELS_LAST)
_ADDRESS = tl.constexpr(CHANNELS_LAST - 1)
# Kinds: element types of a gradient. 2 is float16.
FLOAT32, BFLOAT16 = tl.constexpr(0), tl.constexpr(1)

# The first fields of a block's line in every table: member, shape, first element in the member's
# gradient, stride from row to row of the gradient, and taps of a convolution, else 1.
MEMBER, M, N, GRADIENT, STRIDE, TAPS = map(tl.constexpr, range(6))


@triton.jit
def find(addresses, i):
    """Return the address and the kind of a gradient."""
    entry = tl.load(addresses + i)
    return entry & _ADDRESS, entry >> _KIND


@triton.jit
def gradient_of(line, addresses, member, WIDE: tl.constexpr):
    """Return the first element of a block's gradient, its stride and its taps.

    Taps are 1 unless the gradient is channels-last. WIDE: first element and stride are multiples
    of 8, and the gradient is not channels-last.
    """
    first, stride = tl.load(line + GRADIENT), tl.load(line + STRIDE)
    channels_last = (tl.load(addresses + member) & _CHANNELS_LAST) != 0
    taps = tl.where(channels_last, tl.load(line + TAPS), 1).to(tl.int32)
    if WIDE:
        first, stride = tl.multiple_of(first, 8), tl.multiple_of(stride, 8)
    return first, stride, taps


@triton.jit
def place_of(first, stride, taps, row, column, WIDE: tl.constexpr):
    """Return the offsets of elements of a block in its gradient; see ``gradient_of``.

    Columns are 32-bit numbers: a row has fewer than 2³¹ elements.
    """
    if not WIDE:
        column += (first % stride).to(tl.int32)
        column = column % taps * (stride.to(tl.int32) // taps) + column // taps
        first = first // stride * stride
    return first + row.to(tl.int64) * stride + column


@triton.jit
def pointer_to(address, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """Make a pointer from an address. WIDE tells Triton that it is aligned to 16 bytes."""
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if WIDE else pointer


@triton.jit
def _read(address, TYPE: tl.constexpr, place, mask, WIDE: tl.constexpr):
    return tl.load(pointer_to(address, TYPE, WIDE) + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load(address, kind, place, mask, WIDE: tl.constexpr = False):
    """Load elements of a gradient in float32."""
    if kind == FLOAT32:
        value = _read(address, tl.float32, place, mask, WIDE)
    elif kind == BFLOAT16:
        value = _read(address, tl.bfloat16, place, mask, WIDE)
    else:
        value = _read(address, tl.float16, place, mask, WIDE)
    return value


@triton.jit
def store(address, kind, place, value, mask, WIDE: tl.constexpr = False):
    """Store float32 values to a gradient in its type."""
    if kind == FLOAT32:
        tl.store(pointer_to(address, tl.float32, WIDE) + place, value, mask=mask)
    elif kind == BFLOAT16:
        rounded = value.to(tl.bfloat16)
        tl.store(pointer_to(address, tl.bfloat16, WIDE) + place, rounded, mask=mask)
    else:
        # G̃ has the norm of G, but one element may exceed float16's range: saturate.
        saturated = tl.minimum(tl.maximum(value, -65504.0), 65504.0).to(tl.float16)
        tl.store(pointer_to(address, tl.float16, WIDE) + place, saturated, mask=mask)


@triton.jit
def _squares(
    address, kind, first, stop, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, WIDE: tl.constexpr
):
    """Return BLOCK sums of squares of a piece of a gradient; WIDE: the piece is whole."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(ROUNDS):
        place = first + i * BLOCK + tl.arange(0, BLOCK)
        mask = place < stop
        if WIDE:
            mask = tl.max_constancy(mask, 16)
        value = load(address, kind, place, mask, WIDE)
        total += value * value
    return total


@triton.jit
def squares_kernel(tiles, addresses, squares, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Sum up the squares of a piece of a gradient: (gradient, first element, one past the last)."""
    tile = tiles + tl.program_id(0) * 3
    address, kind = find(addresses, tl.load(tile))
    first, stop = tl.multiple_of(tl.load(tile + 1), BLOCK), tl.load(tile + 2)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if address != 0:
        # Both cases are in one kernel: two kernels would give sums with different bits.
        if (address % 16 == 0) & (stop - first == BLOCK * ROUNDS):
            total = _squares(address, kind, first, stop, BLOCK, ROUNDS, True)
        else:
            total = _squares(address, kind, first, stop, BLOCK, ROUNDS, False)
    tl.store(squares + tl.program_id(0), tl.sum(total))


@triton.jit
def sum_of(numbers, start, stop, BLOCK: tl.constexpr):
    """Sum up numbers in a fixed order."""
    total = 0.0
    for first in range(start, stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(numbers + place, mask=place < stop, other=0.0))
    return total


@triton.jit
def norms_kernel(ends, squares, norms, finite, skipped, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute and test ‖G‖_F of gradient i, from pieces ``ends[i]`` to ``ends[i + 1]``."""
    gradient = tl.program_id(0)
    start, stop = tl.load(ends + gradient), tl.load(ends + gradient + 1)
    total = sum_of(squares, start, stop, BLOCK)
    tl.store(norms + gradient, tl.sqrt(total))
    good = tl.where(total < float("inf"), 1, 0)  # 0 for NaN
    tl.store(finite + gradient, good.to(tl.uint8))
    if COUNT:
        tl.atomic_add(skipped, (1 - good).to(tl.int64))


@triton.jit
def zero_kernel(tiles, addresses, finite, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Zero a piece of a gradient that is not finite."""
    tile = tiles + tl.program_id(0) * 3
    gradient = tl.load(tile)
    if tl.load(finite + gradient) != 0:
        return
    address, kind = find(addresses, gradient)
    first, stop = tl.load(tile + 1), tl.load(tile + 2)
    if address != 0:
        for i in range(ROUNDS):
            place = first + i * BLOCK + tl.arange(0, BLOCK)
            store(address, kind, place, tl.zeros((BLOCK,), dtype=tl.float32), place < stop)
