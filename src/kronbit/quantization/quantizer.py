"""The quantiser: bits, mapping and block size in one value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kronbit.quantization import reference
from kronbit.quantization.mappings import MAPPINGS

BITS = (3, 4, 6, 8, 32)


class Quantized(NamedTuple):
    """A quantised tensor.

    Attributes:
        codes: uint8, the packed codes of each row (at 32 bits: the float32 values themselves).
        scales: float32, the largest absolute value of each block (at 32 bits: no element).
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Quantizer:
    """Block-wise quantiser (Q, D) of the paper, along the last axis of tensors of any shape.

    Attributes:
        bits: b, the width of a code: 3, 4, 6, 8, or 32 for the identity.
        mapping: R, the codebook: ``"linear2"``, ``"dt"`` or ``"linear"``.
        block_size: Elements that share one scale: a multiple of 16 (so that a block ends on a
            whole byte at every width) from 16 to 2048.
    """

    bits: int = 4
    mapping: str = "linear2"
    block_size: int = 64

    def __post_init__(self) -> None:
        # Check the type as well: 4.0 == 4 and True == 1.
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}; got {self.bits!r}")
        if self.mapping not in MAPPINGS:
            raise ValueError(f"mapping must be one of {MAPPINGS}; got {self.mapping!r}")
        size = self.block_size
        if type(size) is not int or size not in range(16, 2049, 16):
            raise ValueError(f"block_size must be a multiple of 16 from 16 to 2048; got {size!r}")

    def quantize(self, x: Tensor) -> Quantized:
        """Quantise along the last axis.

        Args:
            x: Values (..., n), floating point; arithmetic is float32.

        Returns:
            Packed codes (..., ceil(n bits / 8)) and scales (..., ceil(n / block_size)).

        Raises:
            TypeError: If ``x`` is not a real floating-point tensor.
            ValueError: If ``x`` has no axis or holds a non-finite value.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"quantize needs a real floating-point tensor; got {kind}")
        if x.dim() == 0:
            raise ValueError("quantize needs at least one axis; got a 0-d tensor: use x[None]")
        x = x.detach().to(torch.float32)
        finite = torch.isfinite(x)
        if not finite.all():
            first = tuple((~finite).nonzero()[0].tolist())
            raise ValueError(
                f"quantize needs finite float32 values; {int((~finite).sum())} of {x.numel()} are "
                f"not, the first is {x[first].item()} at index {first}"
            )
        return self.encode(x)

    @torch.no_grad()
    def dequantize(self, q: Quantized, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Restore the values of ``quantize``.

        Args:
            q: The result of ``quantize``.
            length: n, the size of the last axis (a packed row may be padded).
            dtype: The result's dtype.

        Returns:
            Values (..., length).

        Raises:
            ValueError: If codes or scales do not hold ``length`` elements.
        """
        codes, scales = self.lengths(length)
        for name, tensor, expected in (("codes", q.codes, codes), ("scales", q.scales, scales)):
            if tensor.dim() == 0 or tensor.shape[-1] != expected:
                raise ValueError(
                    f"{name} for length {length} ({self.bits} bits, block size {self.block_size}) "
                    f"need a last axis of size {expected}; got shape {tuple(tensor.shape)}"
                )
        return self.decode(q, length).to(dtype)

    def encode(self, x: Tensor) -> Quantized:
        """Quantise finite float32 values without the checks, and so without a host sync."""
        if self.bits == 32:
            return Quantized(x.clone(), x.new_empty(*x.shape[:-1], 0))
        return Quantized(*reference.quantize(x, *self.code_format))

    def decode(self, q: Quantized, length: int) -> Tensor:
        """Restore values without the checks of ``dequantize``, as a new float32 tensor."""
        if self.bits == 32:
            return q.codes.clone()
        return reference.dequantize(q.codes, q.scales, *self.code_format, length)

    @cached_property
    def code_format(self) -> reference.CodeFormat:
        """Bits, mapping and block size, as functions on codes take them."""
        return reference.CodeFormat(self.bits, self.mapping, self.block_size)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the lengths of the codes and of the scales of a row of ``length`` elements."""
        if self.bits == 32:
            return length, 0
        codes = reference.packed_length(length, self.bits)
        return codes, reference.block_count(length, self.block_size)
