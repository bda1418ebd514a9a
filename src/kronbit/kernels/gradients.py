"""How kernels reach gradients, which move from step to step: by a table of addresses.

The table begins with the buffers of the step (``Header``); address and kind of every gradient
follow. Address 0: there is none, or it is to be passed over.
"""

from __future__ import annotations

import enum

import triton
import triton.language as tl


class Header(enum.IntEnum):
    """What the table of addresses begins with."""

    SCRATCH = 0  # not an address, but elements from the anchor on
    HELD = 1
    NORMS = 2
    LENGTH = 3


class Kind(enum.IntEnum):
    """Element types of a gradient, as the kernels number them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


LENGTH: tl.constexpr = tl.constexpr(int(Header.LENGTH))
FLOAT32: tl.constexpr = tl.constexpr(int(Kind.FLOAT32))
BFLOAT16: tl.constexpr = tl.constexpr(int(Kind.BFLOAT16))


@triton.jit
def find(addresses, i):
    """Address and kind of a gradient."""
    place = addresses + LENGTH + i * 2
    return tl.load(place), tl.load(place + 1)


@triton.jit
def load(address, kind, place, mask):
    """Elements of a gradient in float32."""
    value = tl.zeros_like(place).to(tl.float32)
    if kind == FLOAT32:
        value = tl.load(address.to(tl.pointer_type(tl.float32)) + place, mask=mask, other=0.0)
    elif kind == BFLOAT16:
        value = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + place, mask=mask, other=0.0).to(
            tl.float32
        )
    else:
        value = tl.load(address.to(tl.pointer_type(tl.float16)) + place, mask=mask, other=0.0).to(
            tl.float32
        )
    return value


@triton.jit
def store(address, kind, place, value, mask):
    """Write float32 values to a gradient in its own type."""
    if kind == FLOAT32:
        tl.store(address.to(tl.pointer_type(tl.float32)) + place, value, mask=mask)
    elif kind == BFLOAT16:
        half = value.to(tl.bfloat16)
        tl.store(address.to(tl.pointer_type(tl.bfloat16)) + place, half, mask=mask)
    else:
        # The norm is that of G, but one element may exceed what G's had: saturate.
        saturated = tl.minimum(tl.maximum(value, -65504.0), 65504.0).to(tl.float16)
        tl.store(address.to(tl.pointer_type(tl.float16)) + place, saturated, mask=mask)


@triton.jit
def norms_kernel(tiles, addresses, squares, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """The sum of squares of a piece of a gradient: (gradient, first element, one past the last)."""
    tile = tiles + tl.program_id(0) * 3
    address, kind = find(addresses, tl.load(tile))
    first, stop = tl.load(tile + 1), tl.load(tile + 2)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if address != 0:
        for i in range(ROUNDS):
            place = first + i * BLOCK + tl.arange(0, BLOCK)
            value = load(address, kind, place, place < stop)
            total += value * value
    tl.store(squares + tl.program_id(0), tl.sum(total))


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
