"""Division of parameters into matrices and blocks: shapes only, no tensors.

A parameter is a stack of E matrices of M rows and N columns. Rows and columns are cut so that no
side of a block exceeds ``max_order``. Blocks are numbered row by row, and the number is part of the
block's key in the optimizer's state. Blocks of one shape that lie in a regular grid are one strided
view of the gradient, so the cost of gathering grows with the number of grids, not of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from kronbit.config import Config

if TYPE_CHECKING:
    from torch import Tensor

# Returns how a parameter is cut into blocks, or why it is left to F.
Route: TypeAlias = "Callable[[Tensor, Config], Blocking | str]"


@dataclass(frozen=True)
class Block:
    """Block ``index``: rows [row, row + m), columns [column, column + n) of matrix ``matrix``."""

    index: int
    matrix: int
    row: int
    column: int
    m: int
    n: int


@dataclass(frozen=True, eq=False)  # ranges with different steps may compare equal
class Grid:
    """A grid of ``matrices`` x ``len(rows)`` x ``len(columns)`` blocks of one shape.

    Attributes:
        matrices: E, the number of stacked matrices.
        rows: The first row of each block row; its step is m.
        columns: The first column of each block column; its step is n.
        first: Indices of the first block row and the first block column within the matrix.
        total: Numbers of block rows and block columns of a matrix, in all of its grids.
    """

    matrices: int
    rows: range
    columns: range
    first: tuple[int, int]
    total: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of each block."""
        return self.rows.step, self.columns.step

    @property
    def dims(self) -> tuple[int, int, int]:
        """Numbers of matrices, block rows and block columns."""
        return self.matrices, len(self.rows), len(self.columns)

    def __len__(self) -> int:
        return math.prod(self.dims)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in the order of ``view_blocks``."""
        m, n = self.shape
        for e in range(self.matrices):
            for i, row in enumerate(self.rows, self.first[0]):
                for j, column in enumerate(self.columns, self.first[1]):
                    index = (e * self.total[0] + i) * self.total[1] + j
                    yield Block(index, e, row, column, m, n)


@dataclass(frozen=True)
class Blocking:
    """Division of one parameter into blocks.

    Attributes:
        matrices: (E, M, N), the shape of the parameter as a stack of matrices.
        grids: The blocks, in grids of one shape each.
        taps: Kernel size of a convolution's weight, whose columns are (input, tap). 1 for other
            parameters.
    """

    matrices: tuple[int, int, int]
    grids: tuple[Grid, ...]
    taps: int = 1

    def __len__(self) -> int:
        return sum(map(len, self.grids))


def cut(length: int, max_order: int, split: str) -> list[int]:
    """Return the sizes of the pieces of a side, none above ``max_order``.

    Greedy (the paper's): max_order, max_order, ..., remainder. Even: equal pieces, rounded up to a
    multiple of 64; the last piece may be shorter.
    """
    if length <= max_order:
        return [length]
    size = max_order
    if split == "even":
        count = -(-length // max_order)
        size = min(max_order, -(-length // count // 64) * 64)
    whole, rest = divmod(length, size)
    return [size] * whole + ([rest] if rest else [])


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Yield runs of equal pieces: the index of the first piece, and the start of every piece."""
    number = start = 0
    for size, run in groupby(sizes):
        count = len(list(run))
        yield number, range(start, start + count * size, size)
        number, start = number + count, start + count * size


@lru_cache(maxsize=4096)
def route(shape: tuple[int, ...], config: Config) -> Blocking | str:
    """Cut a parameter into blocks, or return why it is left to the base optimizer.

    Raises:
        ValueError: If ``split_sizes`` sums to neither the number of rows nor that of columns.
    """
    if not config.precondition:
        return "precondition=False"
    if math.prod(shape) == 0:
        return "empty"
    if len(shape) < config.batch_dims:
        return f"fewer than batch_dims={config.batch_dims} axes"
    E = math.prod(shape[: config.batch_dims])
    sides = [size for size in shape[config.batch_dims :] if size > 1]
    if len(sides) < 2:
        return "not a matrix"
    M, N = sides[0], math.prod(sides[1:])
    parts = {"rows": [M], "columns": [N]}
    if config.split_sizes is not None:
        size = sum(config.split_sizes)
        if size not in (M, N):
            raise ValueError(
                f"split_sizes {config.split_sizes} sums to {size}, but a parameter of shape "
                f"{shape} is a matrix of {M} rows and {N} columns: put parameters that are not "
                "stacked into another param group"
            )
        parts["rows" if size == M else "columns"] = list(config.split_sizes)
    rows, columns = (
        [size for part in side for size in cut(part, config.max_order, config.split)]
        for side in parts.values()
    )
    total = len(rows), len(columns)
    return Blocking(
        (E, M, N),
        tuple(Grid(E, r, c, (i, j), total) for i, r in _runs(rows) for j, c in _runs(columns)),
        math.prod(shape[2:]) if config.batch_dims == 0 and shape[0] == M else 1,
    )
