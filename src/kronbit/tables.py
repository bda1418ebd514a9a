"""Tables that tell the grouped kernels which blocks there are, and which program does what.

They depend on the plan alone, so they are made once. Gradients move from step to step: their
addresses are a small table of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kronbit.addresses import to_device
from kronbit.factors import Factors
from kronbit.groups import Group
from kronbit.kernels.lines import COUNT, OTHER_SIDE, STRIP, Field, block_head
from kronbit.kernels.split import padded
from kronbit.quantization import Quantizer

if TYPE_CHECKING:
    from kronbit.preconditioner import Preconditioner

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
    """

    precise: bool

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


_SMALL, _LARGE = Shape((128, 128), 64, 4, 3), Shape((128, 256), 64, 8, 4)
_PRECISE = Shape((64, 128), 64, 4, 3)


@dataclass(frozen=True, eq=False)  # two blocks are never the same
class TableBlock:
    """A block, and where its gradient is: from ``first`` on, ``stride`` elements per row."""

    member: int
    number: int
    group: Group
    row: int
    first: int
    stride: int

    def scratch(self, precision: Precision) -> int:
        """Elements of scratch: two roots, X and Y."""
        m, n = map(padded, self.group.shape)
        return precision.parts * (m * m + n * n + 2 * m * n)


@dataclass(frozen=True)
class Chunk:
    """Blocks that go through the scratch together.

    Attributes:
        blocks: The blocks.
        roots: Of each root format: whether eight codes are a word of their own, as those of a row
            of a multiple of eight are, and (block, side, first) of each program that restores.
            The first is that of the block's programs, here and below.
        strips: (block, first) of each program that gathers or scatters.
        wide: Whether rows of all gradients begin and end at multiples of 8 elements.
        tiles: (block, first) of each program of a product.
        square: Where its programs' sums of squares begin among the wave's.
        lane: Whose scratch it uses.
    """

    blocks: tuple[TableBlock, ...]
    roots: tuple[tuple[Quantizer, bool, Tensor], ...]
    strips: Tensor
    wide: bool
    tiles: Tensor
    square: int
    lane: int


@dataclass(frozen=True)
class TableWave:
    """Members that are grafted together.

    Attributes:
        lines: The blocks' lines of integers.
        members: (member, first, one past the last of its squares) of each.
        chunks: Its blocks in order.
        squares: How many programs compute products.
        held: Elements of Ĝ that are held at once: all, or, where that does not fit, a chunk's.
        scratch: Elements of all lanes' scratch.
        fits: Whether Ĝ of the wave is held until it is grafted; else it is computed twice.
        offsets: Where Ĝ of each block begins in the held stack.
    """

    lines: Tensor
    members: Tensor
    chunks: tuple[Chunk, ...]
    squares: int
    held: int
    scratch: int
    fits: bool
    offsets: dict[TableBlock, int]


def make_waves(
    preconditioner: Preconditioner,
    wanted: Collection[int],
    precision: Precision,
    device: torch.device,
) -> tuple[list[TableWave], Shape]:
    """Cut members into waves whose Ĝ, and whose chunks' scratch, fit into the workspace.

    Args:
        preconditioner: Members, blocks and workspace: three eighths of that are scratch; the rest
            holds Ĝ.
        wanted: Which of the members.
        precision: How much scratch they need.
        device: Where the tables go.

    Returns:
        The waves, and how their products are cut.
    """
    members, groups = preconditioner.members, preconditioner.groups
    workspace = preconditioner.workspace
    blocks = [
        TableBlock(member, number, group, row, first, stride)
        for group in groups
        for row, member, number, first, stride in group.places(members)
        if member in wanted
    ]
    blocks.sort(key=lambda block: (block.member, block.number))
    scratch = workspace * 3 // 8 // 2 // LANES
    hold = workspace * 5 // 8 // precision.held.itemsize
    waves: list[list[TableBlock]] = []
    total = 0
    for own in _runs(blocks):
        size = sum(held_size(block) for block in own)
        if not waves or total + size > hold:
            waves.append([])
            total = 0
        waves[-1] += own
        total += size
    shape = precision.shape(block.group.shape for block in blocks)
    return [_make_wave(wave, precision, shape, hold, scratch, device) for wave in waves], shape


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


def _make_wave(
    blocks: Sequence[TableBlock],
    precision: Precision,
    shape: Shape,
    hold: int,
    scratch: int,
    device: torch.device,
) -> TableWave:
    fits = sum(map(held_size, blocks)) <= hold
    hold = hold // LANES  # of a chunk, where the wave does not fit
    pieces = list(_pieces(blocks, precision, scratch, hold if not fits else None))
    lines, members, offsets = array("q"), array("i"), {}
    squares = held = largest_held = 0
    lane_size = max(sum(block.scratch(precision) for block in piece) for piece in pieces)
    lane_held = max(sum(map(held_size, piece)) for piece in pieces)
    lists = _ProgramLists()
    chunks: list[Callable[[Tensor], Chunk]] = []
    for number, piece in enumerate(pieces):
        if not fits:
            held = number % LANES * lane_held
        first_line, first_square = len(lines) // COUNT, squares
        place = number % LANES * lane_size
        for block in piece:
            offsets[block] = held
            lines.extend(_line(block, precision, place, held))
            place += block.scratch(precision)
            held += held_size(block)
            before = squares
            squares += _tile_count(block, shape)
            if members and members[-3] == block.member:
                members[-1] = squares
            else:
                members.extend((block.member, before, squares))
        chunks.append(_plan_chunk(piece, first_line, first_square, number % LANES, shape, lists))
        largest_held = max(largest_held, held)
    table = to_device(lists.integers, device).view(-1)
    return TableWave(
        lines=to_device(lines, device, COUNT),
        members=to_device(members, device, 3),
        chunks=tuple(make(table) for make in chunks),
        squares=squares,
        held=largest_held,
        scratch=min(LANES, len(pieces)) * lane_size,
        fits=fits,
        offsets=offsets,
    )


class _ProgramLists:
    """Lists of programs in one table: many small ones would take long to send."""

    def __init__(self) -> None:
        self.integers = array("i")

    def add(self, counts: Iterable[tuple[tuple[int, ...], int]]) -> Callable[[Tensor], Tensor]:
        """A list in which everybody has a number of programs; returns how to find it again."""
        start, first, width = len(self.integers), 0, 0
        for who, count in counts:
            self.integers.extend(array("i", (*who, first)) * count)
            first, width = first + count, len(who) + 1
        stop = len(self.integers)
        self.integers.extend((0,) * (-stop % 4))  # the next one begins at a multiple of 16 bytes
        return lambda table: table[start:stop].view(-1, width)


def _tile_count(block: TableBlock, shape: Shape) -> int:
    m, n = block.group.shape
    return -(-m // shape.tile[0]) * -(-n // shape.tile[1])


def _pieces(
    blocks: Sequence[TableBlock], precision: Precision, scratch: int, hold: int | None
) -> Iterator[list[TableBlock]]:
    """Cut the blocks of a wave into chunks; one block may exceed the scratch."""
    piece: list[TableBlock] = []
    used = kept = 0
    for block in blocks:
        full = used + block.scratch(precision) > scratch
        full = full or (hold is not None and kept + held_size(block) > hold)
        if piece and full:
            yield piece
            piece, used, kept = [], 0, 0
        piece.append(block)
        used, kept = used + block.scratch(precision), kept + held_size(block)
    yield piece


def _plan_chunk(
    piece: Sequence[TableBlock],
    first_line: int,
    square: int,
    lane: int,
    shape: Shape,
    lists: _ProgramLists,
) -> Callable[[Tensor], Chunk]:
    """What makes the chunk, once its lists are on the device."""
    formats: dict[tuple[Quantizer, bool], list[tuple[tuple[int, int], int]]] = {}
    for line, block in enumerate(piece, first_line):
        m, n = block.group.shape
        for side, (order, factors) in enumerate(((m, block.group.left), (n, block.group.right))):
            root = factors.format.root
            words = root.bits == 4 and root.block_size % 8 == 0 and order % 8 == 0
            count = padded(order) // STRIP
            formats.setdefault((root, words), []).append(((line, side), count))
    roots = {key: lists.add(counts) for key, counts in formats.items()}
    numbered = list(enumerate(piece, first_line))
    strips = lists.add(((i,), padded(block.group.shape[0]) // STRIP) for i, block in numbered)
    tiles = lists.add(((i,), _tile_count(block, shape)) for i, block in numbered)
    wide = all(
        side % 8 == 0
        for block in piece
        for side in (block.group.shape[1], block.first, block.stride)
    )
    return lambda table: Chunk(
        blocks=tuple(piece),
        roots=tuple((*key, find(table)) for key, find in roots.items()),
        strips=strips(table),
        wide=wide,
        tiles=tiles(table),
        square=square,
        lane=lane,
    )


def _line(block: TableBlock, precision: Precision, place: int, held: int) -> list[int]:
    m, n = block.group.shape
    pm, pn = padded(m), padded(n)
    line = block_head(block.member, (m, n), block.first, block.stride)
    line += [0] * (COUNT - len(line))
    line[Field.LEFT] = place
    line[Field.RIGHT] = place + precision.parts * pm * pm
    line[Field.X] = line[Field.RIGHT] + precision.parts * pn * pn
    line[Field.Y] = line[Field.X] + precision.parts * pm * pn
    line[Field.HELD] = held
    for side, factors in enumerate((block.group.left, block.group.right)):
        for field, value in _root(factors, block.row).items():
            line[field + side * OTHER_SIDE] = value
    return line


def _root(factors: Factors, row: int) -> dict[Field, int]:
    """Addresses of a root. A 32-bit one is its own diagonal, at every (n + 1)-th element."""
    if factors.format.root.bits == 32:
        address = _address(factors, "root", row)
        return {
            Field.CODES: address,
            Field.DIAGONAL: address,
            Field.DIAGONAL_STRIDE: factors.order + 1,
        }
    return {
        Field.CODES: _address(factors, "root_codes", row),
        Field.SCALES: _address(factors, "root_scales", row),
        Field.DIAGONAL: _address(factors, "root_diagonal", row),
        Field.DIAGONAL_STRIDE: 1,
    }


def _address(factors: Factors, name: str, row: int) -> int:
    tensor = factors.tensors[name]
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
