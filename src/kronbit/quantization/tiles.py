"""Square tiles of lower triangles: how compact storage lays triangles out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def tile_count(order: int, tile: int) -> int:
    """Return the number of tiles on and below the diagonal."""
    side = -(-order // tile)
    return side * (side + 1) // 2


def lower_tiles(X: Tensor, tile: int) -> Tensor:
    """Cut the strictly lower triangles of (k, n, n) into zero-padded (k, tiles, tile, tile)."""
    tiles = X.new_zeros(len(X), tile_count(X.shape[-1], tile), tile, tile)
    for in_tiles, in_matrix in _tile_rows(tiles, X):
        in_tiles.copy_(in_matrix)
    side = -(-X.shape[-1] // tile)
    for i in range(side):
        on_diagonal = tiles[:, tile_count((i + 1) * tile, tile) - 1]
        on_diagonal.copy_(on_diagonal.tril(-1))
    return tiles


def from_lower_tiles(tiles: Tensor, order: int) -> Tensor:
    """Restore the lower triangles (k, n, n) from tiles."""
    X = tiles.new_zeros(len(tiles), order, order)
    for in_tiles, in_matrix in _tile_rows(tiles, X):
        in_matrix.copy_(in_tiles)
    return X


def _tile_rows(tiles: Tensor, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views (k, rows, tiles, columns) of the same elements in the tiles and in X."""
    k, order = X.shape[:2]
    tile = tiles.shape[-1]
    for i, start in enumerate(range(0, order, tile)):
        stop = min(start + tile, order)
        in_tiles = tiles[:, i * (i + 1) // 2 : (i + 1) * (i + 2) // 2].transpose(1, 2)
        if i:
            yield in_tiles[:, : stop - start, :i], X[:, start:stop, :start].view(k, -1, i, tile)
        on = slice(0, stop - start)
        yield in_tiles[:, on, i, on], X[:, start:stop, start:stop]
