"""Parameters become matrices, and matrices are cut into blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle

from kronbit.blocks.blocking import Blocking, cut, route
from kronbit.blocks.gradients import boxes, view_blocks
from kronbit.config import Config


def blocking(shape: tuple[int, ...], **options: object) -> Blocking:
    result = route(shape, Config(**options))
    assert isinstance(result, Blocking)
    return result


@given(st.integers(1, 5000), st.integers(1, 1500), st.sampled_from(["greedy", "even"]))
def test_cut_matches_the_oracle(length: int, max_order: int, split: str) -> None:
    sizes = cut(length, max_order, split)
    assert sum(sizes) == length
    assert max(sizes) <= max_order
    assert sizes == [stop - start for start, stop in oracle.pieces(length, max_order, split)]


def test_cuts_have_the_expected_sizes() -> None:
    assert cut(1536, 1200, "greedy") == [1200, 336]
    assert cut(1536, 1200, "even") == [768, 768]
    assert cut(3072, 1200, "even") == [1024, 1024, 1024]
    assert cut(1300, 1200, "even") == [704, 596]
    assert cut(2399, 1200, "even") == [1200, 1199]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=4),
    st.integers(1, 6),
    st.sampled_from(["greedy", "even"]),
    st.integers(0, 1),
    st.data(),
)
def test_blocks_tile_every_matrix_once(
    shape: list[int], max_order: int, split: str, batch_dims: int, data: st.DataObject
) -> None:
    sides = [side for side in shape[batch_dims:] if side > 1]
    split_sizes = None
    if len(sides) > 1 and data.draw(st.booleans()):
        first = data.draw(st.integers(1, sides[0] - 1))
        split_sizes = (first, sides[0] - first)
    config = Config(
        max_order=max_order, split=split, batch_dims=batch_dims, split_sizes=split_sizes
    )
    result = route(tuple(shape), config)
    if len(sides) < 2:
        assert result == "not a matrix"
        return
    assert isinstance(result, Blocking)
    E, M, N = result.matrices
    assert math.prod(shape) == E * M * N
    count = torch.zeros(E, M, N, dtype=torch.int)
    numbers = torch.full((E, M, N), -1)
    pieces = [piece for grid in result.grids for piece in grid.blocks()]
    for piece in pieces:
        assert 1 <= piece.m <= max_order
        assert 1 <= piece.n <= max_order
        if split_sizes is not None:
            assert (piece.row < split_sizes[0]) == (piece.row + piece.m <= split_sizes[0])
        index = (
            piece.matrix,
            slice(piece.row, piece.row + piece.m),
            slice(piece.column, piece.column + piece.n),
        )
        count[index] += 1
        numbers[index] = piece.index
    assert (count == 1).all()
    assert sorted(piece.index for piece in pieces) == list(range(len(result)))
    # Blocks are numbered row by row, in the order of their first elements.
    corners = sorted((piece.matrix, piece.row, piece.column, piece.index) for piece in pieces)
    assert [corner[-1] for corner in corners] == list(range(len(result)))
    # A grid's view lists its blocks in the order of blocks().
    for grid in result.grids:
        listed = view_blocks(grid, numbers).reshape(-1, *grid.shape)
        for piece, values in zip(grid.blocks(), listed, strict=True):
            assert (values == piece.index).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_boxes_cover_a_range_in_order(dims: list[int], data: st.DataObject) -> None:
    total = math.prod(dims)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    grid = torch.arange(total).view(dims)
    covered = [int(x) for box in boxes(tuple(dims), start, stop) for x in grid[box].flatten()]
    assert covered == list(range(start, stop))
    assert len(boxes(tuple(dims), start, stop)) <= 2 * len(dims) - 1


def test_shapes_become_matrices_as_in_the_paper() -> None:
    assert blocking((64, 3, 7, 7)).matrices == (1, 64, 147)  # convolution
    assert blocking((96, 1, 7, 7)).matrices == (1, 96, 49)  # depthwise
    assert blocking((1, 197, 384)).matrices == (1, 197, 384)  # position embedding
    assert blocking((8, 30, 20), batch_dims=1).matrices == (8, 30, 20)  # experts
    assert blocking((8, 1, 30, 20), batch_dims=1).matrices == (8, 30, 20)
    assert len(blocking((8, 30, 20), batch_dims=1)) == 8
    assert blocking((8, 30, 20)).matrices == (1, 8, 600)
    for shape in [(), (5,), (1, 1, 384), (1, 5), (7, 1, 1)]:
        assert route(shape, Config()) == "not a matrix"
    assert route((3, 4), Config(batch_dims=1)) == "not a matrix"
    assert route((3,), Config(batch_dims=2)) == "fewer than batch_dims=2 axes"
    assert route((0, 4), Config()) == "empty"
    assert route((3, 4), Config(precondition=False)) == "precondition=False"


def test_split_sizes_cut_rows_or_else_columns() -> None:
    rows = blocking((12, 5), split_sizes=(4, 4, 4))
    assert [grid.shape for grid in rows.grids] == [(4, 5)]
    assert len(rows) == 3
    columns = blocking((5, 12), split_sizes=(6, 3, 3))
    assert [grid.shape for grid in columns.grids] == [(5, 6), (5, 3)]
    grouped_query = blocking((8, 5), split_sizes=(4, 2, 2), max_order=3)
    assert [piece.m for grid in grouped_query.grids for piece in grid.blocks()][::2] == [3, 1, 2, 2]
    with pytest.raises(ValueError, match=r"split_sizes \(4, 4\) sums to 8.*12 rows and 5 col"):
        route((12, 5), Config(split_sizes=(4, 4)))
