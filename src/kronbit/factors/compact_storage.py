"""Storage in half the paper's memory: one triangle, in tiles, and scales quantised again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kronbit.factors.layout import Layout, Leaves, Shape, operand_of
from kronbit.kernels.guard import has_kernels
from kronbit.linalg.products import Operand
from kronbit.quantization import Quantizer, reference

TILES = (32, 64)
# Blocks of 32 err less (half a degree of an update at 4 bits, by
# ``benchmarks/accuracy/update_angle.py``), so tiles of 64 must save more than a hundredth.
_HANDICAP = {32: 1.0, 64: 1.01, None: 1.0}


@dataclass(frozen=True)
class CompactStorage:
    """One matrix per row of the stack, without what can be told from the rest.

    Of a triangular or symmetric matrix the strictly lower part is quantised, and the diagonal stays
    float32. It is cut into square tiles, those of the lower triangle in the order of rows, and a
    row of a tile is a block; or, where that is smaller, kept by rows as it is.

    Attributes:
        quantizer: Q and D, below 32 bits.
        prefix: What the names begin with.
        shape: What is known of the matrix.
    """

    quantizer: Quantizer
    prefix: str
    shape: Shape

    def tile(self, order: int) -> int | None:
        """The tiles' side, if there are tiles: what takes the least memory, or nearly so."""
        return None if self.shape == "square" else _best_tile(self, order)

    def layout(self, order: int) -> Layout:
        """Shapes and dtypes of the tensors for matrices of this order."""
        return self._layout(order, self.tile(order))

    def _layout(self, order: int, tile: int | None) -> Layout:
        rows = (order,) if tile is None else (tile_count(order, tile), tile)
        code_length, blocks = self._blocks(tile).lengths(tile or order)
        scales = math.prod(rows) * blocks
        layout: Layout = {}
        if self.shape != "square":
            layout[f"{self.prefix}diagonal"] = ((order,), torch.float32)
        layout[f"{self.prefix}codes"] = ((*rows, code_length), torch.uint8)
        layout[f"{self.prefix}scales"] = ((scales,), torch.uint8)
        tops = reference.block_count(scales, reference.SCALES_PER_TOP)
        layout[f"{self.prefix}top_scales"] = ((tops,), torch.float32)
        return layout

    def _blocks(self, tile: int | None) -> Quantizer:
        """The quantiser with blocks that end where a tile does."""
        own = self.quantizer
        return own if tile is None else Quantizer(own.bits, own.mapping, tile)

    def encode(self, X: Tensor) -> Leaves:
        """Q(X) for a float32 stack (k, n, n); of a symmetric one the lower triangle counts."""
        tile, triangle = self.tile(X.shape[-1]), self.shape != "square"
        own = self._blocks(tile)
        leaves: Leaves = {}
        if triangle:
            leaves[f"{self.prefix}diagonal"] = X.diagonal(dim1=-2, dim2=-1).clone()
        # The codes are the nearest with the scales that are kept, not with the exact ones.
        if has_kernels(X.device):
            from kronbit.kernels import compact

            kept = compact.block_scales(X, triangle, own.block_size, tile is not None)
            scales, tops = compact.round_scales_(kept)
            codes = compact.nearest_codes(
                X, kept, triangle, own.bits, own.mapping, own.block_size, tile is not None
            )
        else:
            if triangle:
                X = X.tril(-1) if tile is None else lower_tiles(X, tile)
            exact = reference.block_scales(X, own.block_size)
            scales, tops = reference.quantize_scales(exact.flatten(1))
            kept = reference.dequantize_scales(scales, tops).view_as(exact)
            codes = reference.nearest_codes(X, kept, own.bits, own.mapping, own.block_size)
        return leaves | {
            f"{self.prefix}codes": codes,
            f"{self.prefix}scales": scales,
            f"{self.prefix}top_scales": tops,
        }

    def decode(self, leaves: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """D: a float32 stack (k, n, n), new or ``out``; of a symmetric matrix, exactly so."""
        codes, scales, tops = (
            leaves[f"{self.prefix}{name}"] for name in ("codes", "scales", "top_scales")
        )
        diagonal = None if self.shape == "square" else leaves[f"{self.prefix}diagonal"]
        order = codes.shape[1] if diagonal is None else diagonal.shape[1]
        tile, mirrored = self.tile(order), self.shape == "symmetric"
        own = self._blocks(tile)
        if has_kernels(codes.device):
            from kronbit.kernels import compact

            if out is None:
                out = torch.empty(
                    len(codes), order, order, dtype=torch.float32, device=codes.device
                )
            compact.decode_(
                out, codes, scales, tops, diagonal, mirrored, own.bits, own.mapping, own.block_size
            )
            return out
        if out is not None:
            return out.copy_(self.decode(leaves))
        scales = reference.dequantize_scales(scales, tops).view(*codes.shape[:-1], -1)
        X = reference.dequantize(
            codes, scales, own.bits, own.mapping, own.block_size, tile or order
        )
        if diagonal is None:
            return X
        if tile is not None:
            X = from_lower_tiles(X, order)
        if mirrored:
            X = X + X.mT  # strictly lower, and strictly upper
        X.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        return X

    def operand(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Operand:
        """D, for products; see ``RowStorage.operand``."""
        return operand_of([self.decode(leaves) for leaves in slices], order)


@cache
def _best_tile(storage: CompactStorage, order: int) -> int | None:
    def cost(tile: int | None) -> float:
        layout = storage._layout(order, tile).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout) * _HANDICAP[tile]

    return min((*TILES, None), key=cost)


def tile_count(order: int, tile: int) -> int:
    """Tiles on and below the diagonal."""
    side = -(-order // tile)
    return side * (side + 1) // 2


def lower_tiles(X: Tensor, tile: int) -> Tensor:
    """The strictly lower triangles of (k, n, n) as (k, tiles, tile, tile), filled up by zeros."""
    tiles = X.new_zeros(len(X), tile_count(X.shape[-1], tile), tile, tile)
    for own, rows in _tile_rows(tiles, X):
        own.copy_(rows)
    side = -(-X.shape[-1] // tile)
    for i in range(side):
        on_diagonal = tiles[:, tile_count((i + 1) * tile, tile) - 1]
        on_diagonal.copy_(on_diagonal.tril(-1))
    return tiles


def from_lower_tiles(tiles: Tensor, order: int) -> Tensor:
    """The lower triangles that tiles stand for, (k, n, n)."""
    X = tiles.new_zeros(len(tiles), order, order)
    for own, rows in _tile_rows(tiles, X):
        rows.copy_(own)
    return X


def _tile_rows(tiles: Tensor, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same elements, as (k, rows, tiles, columns), here and there."""
    k, order = X.shape[:2]
    tile = tiles.shape[-1]
    for i, start in enumerate(range(0, order, tile)):
        stop = min(start + tile, order)
        own = tiles[:, i * (i + 1) // 2 : (i + 1) * (i + 2) // 2].transpose(1, 2)
        if i:
            yield own[:, : stop - start, :i], X[:, start:stop, :start].view(k, -1, i, tile)
        on = slice(0, stop - start)
        yield own[:, on, i, on], X[:, start:stop, start:stop]
