"""Storage of matrices: by rows as in the paper, compact, or in float32.

A stack of square matrices is a dict of tensors, whose first axis indexes the rows of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kronbit.config import Format
from kronbit.linalg.backend import Operand, backend, joined, tile_count
from kronbit.quantization import Quantizer, reference

# The tensors of a stack by name.
Leaves: TypeAlias = dict[str, Tensor]
# Name -> (shape without the row axis, dtype).
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Structure of a matrix: none ("square"), symmetric, or lower triangular.
Structure: TypeAlias = Literal["square", "symmetric", "lower"]

TILES = (32, 64)
# Blocks of 32 have a smaller error (by half a degree of an update at 4 bits, see
# ``benchmarks/accuracy/update_angle.py``), so tiles of 64 must save more than 1 % of the memory.
_HANDICAP = {32: 1.0, 64: 1.01, None: 1.0}


class MatrixStorage(Protocol):
    """Storage of a stack of square matrices."""

    @property
    def quantizer(self) -> Quantizer:
        """The quantiser, Q and D."""

    def layout(self, order: int) -> Layout:
        """Return name -> (shape, dtype) of the tensors of a matrix of this order."""

    def encode(self, X: Tensor) -> Leaves:
        """Return Q(X) of a float32 stack (k, n, n), which may be overwritten."""

    def decode(self, leaves: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """D: return the float32 stack (k, n, n), perhaps the stored tensor: do not write to it.

        If ``out`` is given, it receives the stack; its rows need not be contiguous.
        """

    def operand(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Operand:
        """D: return an operand of concatenated stacks. No element may be far above 1.

        ``order`` is the largest order. Smaller matrices are padded by the identity.
        """


@dataclass(frozen=True)
class RowStorage:
    """The paper's storage: rows of codes with a float32 scale for each block.

    Attributes:
        quantizer: Q and D; at 32 bits the matrix is one float32 tensor.
        plain: Name of the float32 tensor at 32 bits.
        prefix: Prefix of the names ``codes``, ``scales`` and ``diagonal``.
        diagonal: True if the diagonal stays float32 and is not quantised, as in the paper for
            matrices whose diagonal dominates.
    """

    quantizer: Quantizer
    plain: str
    prefix: str = ""
    diagonal: bool = True

    def layout(self, order: int) -> Layout:
        """Return name -> (shape, dtype) of the tensors of a matrix of this order."""
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
        """Return Q(X); X may be overwritten."""
        if self.quantizer.bits == 32:
            return {self.plain: X}
        by = backend(X.device)
        codes, scales, diagonal = by.encode_rows(X, self.diagonal, self.quantizer.code_format)
        leaves = {} if diagonal is None else {f"{self.prefix}diagonal": diagonal}
        return leaves | {f"{self.prefix}codes": codes, f"{self.prefix}scales": scales}

    def decode(self, leaves: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """D: return the stack; at 32 bits, this is the stored tensor: do not write to it."""
        if out is not None:
            return out.copy_(self.decode(leaves))
        if self.quantizer.bits == 32:
            return leaves[self.plain]
        codes, scales = self._rows(leaves)
        diagonal = leaves[f"{self.prefix}diagonal"] if self.diagonal else None
        return backend(codes.device).decode_rows(
            codes, scales, diagonal, self.quantizer.code_format
        )

    def operand(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Operand:
        """D: return an operand of matrices without a separate diagonal."""
        assert not self.diagonal, "the diagonal would be left out"
        by = backend(next(iter(slices[0].values())).device)
        if self.quantizer.bits == 32:
            return by.operand(joined([leaves[self.plain] for leaves in slices], order), 1.0)
        return by.operand_of_rows(list(map(self._rows, slices)), order, self.quantizer.code_format)

    def _rows(self, leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return leaves[f"{self.prefix}codes"], leaves[f"{self.prefix}scales"]


@dataclass(frozen=True)
class CompactStorage:
    """Storage without redundancy: one triangle, and quantised scales.

    The strictly lower part of a triangular or symmetric matrix is quantised, and the diagonal stays
    float32. The lower part is cut into square tiles, in row order, and a row of a tile is a block.
    If storage by rows takes less memory, it is used instead.
    """

    quantizer: Quantizer
    prefix: str
    structure: Structure

    def tile(self, order: int) -> int | None:
        """Return the side of the tiles that need the least memory; None for storage by rows."""
        return None if self.structure == "square" else _best_tile(self, order)

    def layout(self, order: int) -> Layout:
        """Return name -> (shape, dtype) of the tensors of a matrix of this order."""
        return self._layout(order, self.tile(order))

    def _layout(self, order: int, tile: int | None) -> Layout:
        rows = (order,) if tile is None else (tile_count(order, tile), tile)
        code_length, blocks = replace(
            self.quantizer, block_size=tile or self.quantizer.block_size
        ).lengths(tile or order)
        scales = math.prod(rows) * blocks
        layout: Layout = {}
        if self.structure != "square":
            layout[f"{self.prefix}diagonal"] = ((order,), torch.float32)
        layout[f"{self.prefix}codes"] = ((*rows, code_length), torch.uint8)
        layout[f"{self.prefix}scales"] = ((scales,), torch.uint8)
        tops = reference.block_count(scales, reference.SCALES_PER_TOP)
        layout[f"{self.prefix}top_scales"] = ((tops,), torch.float32)
        return layout

    def encode(self, X: Tensor) -> Leaves:
        """Return Q(X); only the lower triangle of a symmetric matrix is read."""
        tile, triangle = self.tile(X.shape[-1]), self.structure != "square"
        leaves: Leaves = {}
        if triangle:
            leaves[f"{self.prefix}diagonal"] = X.diagonal(dim1=-2, dim2=-1).clone()
        code_format = _code_format(self.quantizer, tile)
        encoded = backend(X.device).encode_triangle(X, triangle, code_format, tile is not None)
        names = ("codes", "scales", "top_scales")
        return leaves | {f"{self.prefix}{n}": leaf for n, leaf in zip(names, encoded, strict=True)}

    def decode(self, leaves: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """D: return a stack (k, n, n), new or ``out``. Symmetric matrices are exactly symmetric."""
        codes, scales, tops = (
            leaves[f"{self.prefix}{name}"] for name in ("codes", "scales", "top_scales")
        )
        diagonal = None if self.structure == "square" else leaves[f"{self.prefix}diagonal"]
        order = codes.shape[1] if diagonal is None else diagonal.shape[1]
        code_format = _code_format(self.quantizer, self.tile(order))
        mirrored = self.structure == "symmetric"
        return backend(codes.device).decode_triangle(
            codes, scales, tops, diagonal, mirrored, code_format, out
        )

    def operand(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Operand:
        """D: return an operand of concatenated stacks."""
        whole = joined([self.decode(leaves) for leaves in slices], order)
        return backend(whole.device).operand(whole, 1.0)


@cache
def _code_format(quantizer: Quantizer, tile: int | None) -> reference.CodeFormat:
    """Return the format of codes in tiles: a row of a tile is a block."""
    code_format = quantizer.code_format
    return code_format if tile is None else code_format._replace(block_size=tile)


@cache
def _best_tile(storage: CompactStorage, order: int) -> int | None:
    def cost(tile: int | None) -> float:
        layout = storage._layout(order, tile).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout) * _HANDICAP[tile]

    return min((*TILES, None), key=cost)


def statistic_storage(format: Format, plain: str, structure: Structure) -> MatrixStorage:
    """Return the storage of a statistic; ``plain`` is the name of the tensor at 32 bits."""
    return _storage(format, format.statistic, plain, "", structure)


def root_storage(format: Format) -> MatrixStorage:
    """Return the storage of inverse roots."""
    return _storage(format, format.root, "root", "root_", "symmetric")


def _storage(
    format: Format, quantizer: Quantizer, plain: str, prefix: str, structure: Structure
) -> MatrixStorage:
    if format.compact and quantizer.bits < 32:
        return CompactStorage(quantizer, prefix, structure)
    # A square matrix is an orthogonal basis, whose diagonal does not dominate.
    return RowStorage(quantizer, plain, prefix, diagonal=structure != "square")


def is_root(name: str) -> bool:
    """True if a tensor belongs to the inverse root, not to the statistic."""
    return name.startswith("root")


def is_statistic(name: str) -> bool:
    """True if a tensor belongs to the statistic, not to the inverse root."""
    return not is_root(name)
