"""Square tiles of lower triangles: how compact storage lays triangles out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


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
