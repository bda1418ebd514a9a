"""How the blocks of an ordinary step are cut: into waves, chunks and the programs of products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kronbit.blocks.groups import Group
from kronbit.kernels.split import padded

LANES = 2  # chunks that are under way at the same time, each in a scratch of its own


class Shape(NamedTuple):
    """How the programs of a product are cut.

    Attributes:
        tile: Rows and columns of what a program computes: as much as fits into its registers.
        depth: Columns of the left operand that are multiplied at once.
        warps: Of a program.
        stages: Loads that are under way while tensor cores compute.
    """

    tile: tuple[int, int]
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Precision:
    """How products are taken.

    Attributes:
        precise: Roots, gradients, X and Y are sums of two bf16 numbers, not float16, and Ĝ is held
            in float32, not bf16.
        direct: Gradients are multiplied where they are, if their rows are wide.
    """

    precise: bool
    direct: bool = False

    @property
    def parts(self) -> int:
        """Numbers of 16 bits that make up an element of a root, of X and of Y."""
        return 2 if self.precise else 1

    @property
    def held(self) -> torch.dtype:
        """What Ĝ is held in."""
        return torch.float32 if self.precise else torch.bfloat16

    def shape(self, blocks: Iterable[tuple[int, int]]) -> Shape:
        """How programs are cut, for products of such blocks.

        Larger tiles read less, but more of them hangs over the edges.
        """
        if self.precise:
            return _PRECISE
        blocks = list(blocks)
        small, large = (
            sum(-(-m // rows) * rows * -(-n // columns) * columns for m, n in blocks)
            for rows, columns in (_SMALL.tile, _LARGE.tile)
        )
        return _LARGE if large <= 1.1 * small else _SMALL


_SMALL, _LARGE = Shape((128, 128), 64, 4, 3), Shape((128, 256), 64, 8, 3)
_PRECISE = Shape((64, 128), 64, 4, 3)


@dataclass(frozen=True, eq=False)  # two blocks are never the same
class TableBlock:
    """A block, and where its gradient is: from ``first`` on, ``stride`` elements per row.

    In channels-last order it has the same elements in each row, but elsewhere there.
    """

    member: int
    number: int
    group: Group
    row: int
    first: int
    stride: int
    taps: int
    channels_last: bool

    @property
    def wide(self) -> bool:
        """Whether rows of the gradient are in order, and begin and end at multiples of 8."""
        places = (self.group.shape[1], self.first, self.stride)
        return not self.channels_last and all(place % 8 == 0 for place in places)

    def scratch(self, precision: Precision) -> int:
        """Elements of scratch: two roots, Y, and X if it is not the gradient itself."""
        m, n = map(padded, self.group.shape)
        copies = 1 if precision.direct and self.wide else 2
        return precision.parts * (m * m + n * n + copies * m * n)


def cut_into_waves(
    blocks: Sequence[TableBlock], hold: int
) -> Iterator[tuple[list[TableBlock], int]]:
    """Runs of members, with the size of their Ĝ.

    Two waves are under way: the products of one, and the grafting of the one before it.
    """
    wave: list[TableBlock] = []
    total = 0
    for own in _runs(blocks):
        size = sum(map(held_size, own))
        if wave and total + size > hold // 2:
            yield wave, total
            wave, total = [], 0
        wave += own
        total += size
    yield wave, total


def _runs(blocks: Sequence[TableBlock]) -> Iterator[list[TableBlock]]:
    """The blocks of each member."""
    own: list[TableBlock] = []
    for block in blocks:
        if own and own[0].member != block.member:
            yield own
            own = []
        own.append(block)
    if own:
        yield own


def held_size(block: TableBlock) -> int:
    """Elements of Ĝ of a block, as it is held."""
    m, n = map(padded, block.group.shape)
    return m * n


def cut_into_chunks(
    blocks: Sequence[TableBlock], precision: Precision, scratch: int, hold: int | None
) -> Iterator[list[TableBlock]]:
    """Cut the blocks of a wave into chunks, wide or not; one block may exceed the scratch."""
    piece: list[TableBlock] = []
    used = kept = 0
    for block in blocks:
        full = used + block.scratch(precision) > scratch
        full = full or (hold is not None and kept + held_size(block) > hold)
        if piece and (full or block.wide != piece[0].wide):
            yield piece
            piece, used, kept = [], 0, 0
        piece.append(block)
        used, kept = used + block.scratch(precision), kept + held_size(block)
    yield piece
