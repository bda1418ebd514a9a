"""The paper's storage: quantised rows, the diagonal apart where it dominates; or float32."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kronbit.factors.layout import Layout, Leaves, operand_of
from kronbit.kernels.guard import has_kernels
from kronbit.linalg.products import Operand
from kronbit.quantization import Quantized, Quantizer


@dataclass(frozen=True)
class RowStorage:
    """The paper's: rows of codes with a float32 scale for each block.

    Attributes:
        quantizer: Q and D; at 32 bits the matrix is one float32 tensor.
        plain: That tensor's name.
        prefix: What the names ``codes``, ``scales`` and ``diagonal`` begin with.
        diagonal: Whether the diagonal stays float32 and only the rest is quantised, as the paper
            does for matrices whose diagonal dominates.
    """

    quantizer: Quantizer
    plain: str
    prefix: str = ""
    diagonal: bool = True

    def layout(self, order: int) -> Layout:
        """Shapes and dtypes of the tensors for matrices of this order."""
        if self.quantizer.bits == 32:
            return {self.plain: ((order, order), torch.float32)}
        codes, scales = self.quantizer.lengths(order)
        layout: Layout = {}
        if self.diagonal:
            layout[f"{self.prefix}diagonal"] = ((order,), torch.float32)
        layout[f"{self.prefix}codes"] = ((order, codes), torch.uint8)
        layout[f"{self.prefix}scales"] = ((order, scales), torch.float32)
        return layout

    def encode(self, X: Tensor) -> Leaves:
        """Q(X) for a float32 stack (k, n, n) that the caller gives away: it may be written to."""
        if self.quantizer.bits == 32:
            return {self.plain: X}
        diagonal: Tensor | None = None
        if has_kernels(X.device):
            codes, scales, diagonal = self._kernels().encode(X, self.diagonal, *self._parameters)
        else:
            if self.diagonal:
                diagonal = X.diagonal(dim1=-2, dim2=-1).clone()
                X.diagonal(dim1=-2, dim2=-1).zero_()
            codes, scales = self.quantizer.encode(X)
        leaves = {} if diagonal is None else {f"{self.prefix}diagonal": diagonal}
        return leaves | {f"{self.prefix}codes": codes, f"{self.prefix}scales": scales}

    def decode(self, leaves: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """D: the float32 stack (k, n, n); at 32 bits the stored one, not to be written to."""
        if out is not None:
            return out.copy_(self.decode(leaves))
        if self.quantizer.bits == 32:
            return leaves[self.plain]
        codes, scales = leaves[f"{self.prefix}codes"], leaves[f"{self.prefix}scales"]
        diagonal = leaves[f"{self.prefix}diagonal"] if self.diagonal else None
        if has_kernels(codes.device):
            decoded: Tensor = self._kernels().decode(codes, scales, diagonal, *self._parameters)
            return decoded
        X = self.quantizer.decode(Quantized(codes, scales), codes.shape[-2])
        if diagonal is not None:
            X.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        return X

    def operand(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Operand:
        """D, for products, of matrices with no elements far above 1 and no diagonal apart.

        Args:
            slices: Stacks, one behind the other.
            order: The largest of their orders. A smaller matrix becomes a part of that order; the
                rest is the identity.
        """
        assert not self.diagonal, "the diagonal would be left out"
        device = next(iter(slices[0].values())).device
        if self.quantizer.bits == 32 or not has_kernels(device):
            return operand_of([self.decode(leaves) for leaves in slices], order)
        from kronbit.kernels.split import empty_split

        rows = [len(leaves[f"{self.prefix}codes"]) for leaves in slices]
        parts = empty_split(sum(rows), order, order, device)
        first = 0
        for leaves, count in zip(slices, rows, strict=True):
            codes, scales = leaves[f"{self.prefix}codes"], leaves[f"{self.prefix}scales"]
            self._kernels().decode_parts_(parts, first, codes, scales, *self._parameters)
            first += count
        return parts

    @property
    def _parameters(self) -> tuple[int, str, int]:
        return self.quantizer.bits, self.quantizer.mapping, self.quantizer.block_size

    def _kernels(self) -> ModuleType:
        """The quantiser's kernels, which agree with it bit for bit."""
        return importlib.import_module("kronbit.kernels.quantization")
