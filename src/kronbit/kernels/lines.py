"""Lines, which describe blocks to the kernels of the ordinary step, and the layout of scratch."""

from __future__ import annotations

import triton
import triton.language as tl

from kronbit.kernels.gradients import is_channels_last
from kronbit.kernels.split import PAD, power_below

STRIP = 16  # rows of a block that a program gathers, restores or scatters


# Fields of the line of a block.
MEMBER = tl.constexpr(0)
M = tl.constexpr(1)
N = tl.constexpr(2)
GRADIENT = tl.constexpr(3)  # first element in the parameter's gradient
STRIDE = tl.constexpr(4)  # from row to row of the gradient
TAPS = tl.constexpr(5)  # of a convolution, else 1; up to here, all tables have the same fields
LEFT = tl.constexpr(6)  # scratch: L̂
RIGHT = tl.constexpr(7)  # scratch: R̂
X = tl.constexpr(8)  # scratch
Y = tl.constexpr(9)
HELD = tl.constexpr(10)  # first element of Ĝ in the held stack
CODES = tl.constexpr(11)  # addresses of L̂; those of R̂ follow, TO_RIGHT later
SCALES = tl.constexpr(12)
TOPS = tl.constexpr(13)  # scales of the scales, if these are quantised
DIAGONAL = tl.constexpr(14)
DIAGONAL_STRIDE = tl.constexpr(15)
TO_RIGHT = tl.constexpr(5)
COUNT = 21  # integers in a line
LINE = tl.constexpr(COUNT)

# Fields of the table of a step's buffers.
SCRATCH = tl.constexpr(0)  # not an address, but elements from the anchor on
HELD_STACK = tl.constexpr(1)  # the address of the held stack
NORMS = tl.constexpr(2)  # the address of ‖G‖_F of every member
BUFFERS = 3

PADDING = tl.constexpr(PAD)


@triton.jit
def gradient_of(line, addresses, member, WIDE: tl.constexpr):
    """Return the first element of a block's gradient, its stride and its taps.

    Taps are 1 unless the gradient is channels-last. WIDE: first element and stride are multiples
    of 8, and the gradient is not channels-last.
    """
    first, stride = tl.load(line + GRADIENT), tl.load(line + STRIDE)
    taps = tl.where(is_channels_last(addresses, member), tl.load(line + TAPS), 1).to(tl.int32)
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
def padded(size):
    """Return the padded size of a side."""
    return (size + (PADDING - 1)) // PADDING * PADDING


@triton.jit
def scratch(anchor, buffers, offset):
    """Return a pointer into the scratch, relative to the anchor, a tensor that does not move.

    A pointer made from an integer counts as unaligned: its loads would go element by element.
    """
    return anchor + tl.multiple_of(tl.load(buffers + SCRATCH) + offset, PADDING)


@triton.jit
def keep(target, size, value, mask, PRECISE: tl.constexpr):
    """Store a float32 value in float16, or as hi + lo in bf16, lo ``size`` elements after hi."""
    if PRECISE:
        high = value.to(tl.bfloat16)
        tl.store(target, high, mask=mask)
        tl.store(target + size, (value - high.to(tl.float32)).to(tl.bfloat16), mask=mask)
    else:
        tl.store(target, value.to(tl.float16), mask=mask)


@triton.jit
def gradient_unit(buffers, member):
    """Return the power of two that divides a gradient, so that no element exceeds 2¹⁵."""
    norms = tl.load(buffers + NORMS).to(tl.pointer_type(tl.float32))
    return power_below(tl.load(norms + member)) / 16384.0


@triton.jit
def root_unit(line, side, n):
    """Return the power of two that divides a root, so that no element exceeds 1.

    A root is positive semi-definite: its largest element is on the diagonal.
    """
    diagonal = tl.load(line + DIAGONAL + side * TO_RIGHT).to(tl.pointer_type(tl.float32))
    stride = tl.load(line + DIAGONAL_STRIDE + side * TO_RIGHT)
    largest = tl.zeros((256,), dtype=tl.float32)
    for start in range(0, n, 256):
        i = start + tl.arange(0, 256)
        value = tl.load(diagonal + i * stride, mask=i < n, other=0.0)
        largest = tl.maximum(largest, tl.abs(value))
    return 2.0 * power_below(tl.max(largest))
