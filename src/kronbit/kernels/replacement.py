"""Replacement of old state by new state where it is finite, in two launches for all tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronbit.kernels.launch import launch

MOST = 4  # largest number of tensors of a statistic, or of a root
_ELEMENTS = 4096  # per program, at once
_PROGRAMS = 64  # per row, at most
_TENSORS = [f"{kind}{i}" for kind in ("old", "new") for i in range(MOST)]
_LENGTHS = [f"length{i}" for i in range(MOST)]


@triton.jit
def _is_finite(new, length, ELEMENTS: tl.constexpr):
    """Return 1 if a program's share of a row of float32 numbers is finite, else 0."""
    new = new.to(tl.pointer_type(tl.int32), bitcast=True)
    new += tl.program_id(1).to(tl.int64) * length
    worst = tl.zeros((ELEMENTS,), dtype=tl.int32)
    for start in range(tl.program_id(0) * ELEMENTS, length, tl.num_programs(0) * ELEMENTS):
        place = start + tl.arange(0, ELEMENTS)
        bits = tl.load(new + place, mask=place < length, other=0)
        worst = tl.maximum(worst, bits & 0x7FFFFFFF)
    # Magnitudes keep their order as integers; infinity and NaN are the largest.
    return (tl.max(worst) < 0x7F800000).to(tl.int32)


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=["accepted", *_TENSORS])
def _finite_kernel(
    accepted, new0, new1, new2, new3, length0, length1, length2, length3,
    ELEMENTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Refuse a row if it is not finite."""
    others, lengths = (new1, new2, new3), (length1, length2, length3)
    good = _is_finite(new0, length0, ELEMENTS)
    for i in tl.static_range(COUNT - 1):
        good &= _is_finite(others[i], lengths[i], ELEMENTS)
    if good == 0:  # several programs may write it: all write 0
        tl.store(accepted + tl.program_id(1), 0)


@triton.jit
def _copy(old, new, length, WORDS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Copy a program's share of a row, as words of four bytes or as bytes."""
    TYPE: tl.constexpr = tl.int32 if WORDS else tl.uint8
    old = old.to(tl.pointer_type(TYPE), bitcast=True)
    new = new.to(tl.pointer_type(TYPE), bitcast=True)
    first = tl.program_id(1).to(tl.int64) * length
    for start in range(tl.program_id(0) * ELEMENTS, length, tl.num_programs(0) * ELEMENTS):
        place = start + tl.arange(0, ELEMENTS)
        value = tl.load(new + first + place, mask=place < length, other=0)
        tl.store(old + first + place, value, mask=place < length)


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=["accepted", *_TENSORS])
def _copy_kernel(
    accepted, old0, old1, old2, old3, new0, new1, new2, new3, length0, length1, length2, length3,
    WORDS: tl.constexpr, ELEMENTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Copy a row of all tensors, if it is accepted."""
    if tl.load(accepted + tl.program_id(1)) == 0:
        return
    olds, news = (old0, old1, old2, old3), (new0, new1, new2, new3)
    lengths = (length0, length1, length2, length3)
    for i in tl.static_range(COUNT):
        _copy(olds[i], news[i], lengths[i], WORDS, ELEMENTS)


def replace_rows_(old: Sequence[Tensor], new: Sequence[Tensor], accepted: Tensor) -> None:
    """Copy accepted rows that are finite; see ``linalg.backend``.

    Args:
        old: Up to ``MOST`` contiguous tensors.
        new: The contiguous tensors that replace them.
        accepted: bool (rows,), contiguous. Set to False for rows that are not finite.
    """
    floats = [tensor for tensor in new if tensor.is_floating_point()]
    _launch(_finite_kernel, accepted, [floats], 4)
    words = all(x.data_ptr() % 4 == 0 == x.nbytes // len(x) % 4 for x in (*old, *new))
    _launch(_copy_kernel, accepted, [list(old), list(new)], 4 if words else 1, WORDS=words)


def _launch(
    kernel: Any, accepted: Tensor, lists: list[list[Any]], size: int, **constants: Any
) -> None:
    """Launch a kernel on tensors whose elements have the given size."""
    lengths = [tensor.nbytes // len(tensor) // size for tensor in lists[0]]
    programs = min(_PROGRAMS, -(-max(lengths) // _ELEMENTS))
    # Lists are padded with their first value, up to the number that a kernel takes.
    filled = ([*values, *values[:1] * (MOST - len(values))] for values in [*lists, lengths])
    constants |= {"ELEMENTS": _ELEMENTS, "COUNT": len(lengths)}
    flags = accepted.view(torch.uint8)
    launch(kernel, (programs, len(flags)), flags, *chain(*filled), **constants)
