"""Tables of the ordinary step: its blocks, and the work of every program.

Blocks are cut into waves, which are grafted together; waves into chunks, which share the scratch;
and chunks into programs. Tables depend on the plan alone, so they are made once. Addresses of
gradients change from step to step, and have a small table in ``addresses``.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kronbit.blocks.groups import DeviceStacks, Group
from kronbit.factors import Factors
from kronbit.factors.storage import CompactStorage
from kronbit.gpu.addresses import to_device
from kronbit.kernels.lines import COUNT, OTHER_SIDE, STRIP, Field, block_head
from kronbit.kernels.roots import tiles_per_program
from kronbit.kernels.split import PAD, padded
from kronbit.quantization import Quantizer

LANES = 2  # chunks that are computed at the same time, each in another part of the scratch


class Shape(NamedTuple):
    """Shape of the programs of a product.

    Attributes:
        tile: Rows and columns of a program's result: as much as fits into its registers.
        depth: Columns of the left operand that are multiplied together.
        warps: Warps of a program.
        stages: Loads in flight while tensor cores compute.
    """

    tile: tuple[int, int]
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Precision:
    """Precision of products.

    Attributes:
        precise: True if roots, gradients, X and Y are sums of two bf16 numbers, not float16, and Ĝ
            is held in float32, not bf16.
        direct: True if gradients with wide rows are multiplied in place, without a copy.
    """

    precise: bool
    direct: bool = False

    @property
    def parts(self) -> int:
        """Number of 16-bit numbers in an element of a root, of X and of Y."""
        return 2 if self.precise else 1

    @property
    def held(self) -> torch.dtype:
        """Dtype in which Ĝ is held."""
        return torch.float32 if self.precise else torch.bfloat16

    def shape(self, blocks: Iterable[tuple[int, int]]) -> Shape:
        """Return the shape of programs for products of blocks (m, n).

        Larger tiles read less, but waste more at the edges.
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
    """A block, and its place in the gradient: from ``first`` on, ``stride`` elements per row.

    In channels-last order, a row has the same elements in another order.
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
        """True if rows of the gradient are in order, and begin and end at multiples of 8."""
        places = (self.group.shape[1], self.first, self.stride)
        return not self.channels_last and all(place % 8 == 0 for place in places)

    def scratch(self, precision: Precision) -> int:
        """Return the elements of scratch: two roots, Y, and X if it is not the gradient itself."""
        m, n = map(padded, self.group.shape)
        copies = 1 if precision.direct and self.wide else 2
        return precision.parts * (m * m + n * n + copies * m * n)


class RootKind(NamedTuple):
    """Storage of roots, for which a variant of the kernel is compiled.

    Attributes:
        quantizer: Q and D.
        words: True if eight codes are a word: if rows have a multiple of eight elements.
        compact: True if only one triangle is kept, and scales are quantised.
        tile: The side of the tiles; 0 if roots are kept by rows.
    """

    quantizer: Quantizer
    words: bool
    compact: bool
    tile: int

    @classmethod
    def of(cls, factors: Factors) -> RootKind:
        """Return the kind of a stack."""
        storage, order = factors.method.root, factors.order
        quantizer = storage.quantizer
        if isinstance(storage, CompactStorage):
            return cls(quantizer, words=False, compact=True, tile=storage.tile(order) or 0)
        words = quantizer.bits == 4 and quantizer.block_size % 8 == 0 and order % 8 == 0
        return cls(quantizer, words=words, compact=False, tile=0)

    def programs(self, order: int) -> int:
        """Return the number of programs that restore a root."""
        if not self.tile:
            return padded(order) // STRIP
        side = padded(order) // self.tile
        return -(-(side * (side + 1) // 2) // tiles_per_program(self.tile))


@dataclass(frozen=True)
class Chunk:
    """Blocks that share the scratch.

    Attributes:
        blocks: The blocks.
        roots: For each kind of root, (block, side, first) of each program that restores, where
            ``first`` is the first program of the block.
        strips: Range of the tables' programs that gather or scatter its rows.
        wide: True if the rows of all gradients are wide, False if none are.
        tiles: (block, first) of each program of a product.
        square: Index of the first program's sum of squares.
        lane: Lane whose scratch it uses.
    """

    blocks: tuple[TableBlock, ...]
    roots: tuple[tuple[RootKind, Tensor], ...]
    strips: range
    wide: bool
    tiles: Tensor
    square: int
    lane: int


@dataclass(frozen=True)
class TableWave:
    """Members that are grafted together.

    Attributes:
        members: Range of the tables' members.
        chunks: Its blocks in order.
        fits: True if Ĝ of the wave is held until it is grafted; else it is computed twice.
        alone: True if the wave may need all of the held stack; other waves use half of it.
    """

    members: range
    chunks: tuple[Chunk, ...]
    fits: bool
    alone: bool


@dataclass(frozen=True)
class Tables:
    """Tables of an ordinary step for some members.

    Attributes:
        lines: The blocks' lines of integers.
        members: For each member, (member, first, one past the last) of its sums of squares.
        strips: (block, first) of each program that gathers or scatters rows.
        waves: The waves, in order.
        shape: Shape of the programs of products.
        squares: Number of programs that compute products.
        scratch: Elements of the scratch of all lanes.
        held: Elements of the held stack.
        offsets: First element of Ĝ of each block in the held stack.
    """

    lines: Tensor
    members: Tensor
    strips: Tensor
    waves: tuple[TableWave, ...]
    shape: Shape
    squares: int
    scratch: int
    held: int
    offsets: dict[TableBlock, int]


def make_tables(
    stacks: DeviceStacks,
    wanted: Collection[int],
    precision: Precision,
    channels_last: Collection[int],
) -> Tables:
    """Cut members into waves whose Ĝ, and whose chunks' scratch, fit into the workspace.

    Args:
        stacks: Members, blocks and workspace: three eighths of it are scratch; the rest holds Ĝ.
        wanted: Indices of the members.
        precision: Precision of the products.
        channels_last: Members whose gradients are in that order.
    """
    members, groups, device = stacks.members, stacks.groups, stacks.device
    workspace = stacks.workspace
    blocks = [
        TableBlock(member, number, group, row, first, stride, taps, member in channels_last)
        for group in groups
        for row, member, number, first, stride, taps in group.places(members)
        if member in wanted
    ]
    blocks.sort(key=lambda block: (block.member, block.number))
    shape = precision.shape(block.group.shape for block in blocks)
    hold = workspace * 5 // 8 // precision.held.itemsize // (2 * PAD) * (2 * PAD)
    waves = list(cut_into_waves(blocks, hold))
    # Scratch of a chunk. If its wave does not fit, Ĝ is held only while the chunk is computed.
    scratch = workspace * 3 // 8 // 2 // LANES
    pieces = [
        list(cut_into_chunks(wave, precision, scratch, hold // LANES if size > hold else None))
        for wave, size in waves
    ]
    lane_size = max(
        sum(block.scratch(precision) for block in piece) for wave in pieces for piece in wave
    )
    writer = _Writer(precision, shape)
    waves_drafted, number = [], 0
    for turn, ((_, size), wave) in enumerate(zip(waves, pieces, strict=True)):
        fits, alone = size <= hold, size > hold // 2
        held = 0 if alone else turn % 2 * (hold // 2)
        lane_held = max(sum(map(held_size, piece)) for piece in wave)
        first_member, drafts = len(writer.members) // 3, []
        for piece in wave:
            lane, number = number % LANES, number + 1
            if not fits:
                held = lane * lane_held
            drafts.append(writer.chunk(piece, lane, lane * lane_size, held))
            held += sum(map(held_size, piece))
        span = range(first_member, len(writer.members) // 3)
        waves_drafted.append((span, drafts, fits, alone))
    strips = writer.lists.add(writer.strips)
    table = to_device(writer.lists.integers, device).view(-1)
    return Tables(
        lines=to_device(writer.lines, device, COUNT),
        members=to_device(writer.members, device, 3),
        strips=strips.of(table),
        waves=tuple(
            TableWave(span, tuple(draft.chunk(table) for draft in drafts), fits, alone)
            for span, drafts, fits, alone in waves_drafted
        ),
        shape=shape,
        squares=writer.squares,
        scratch=min(LANES, number) * lane_size,
        held=max(held_size(block) + offset for block, offset in writer.offsets.items()),
        offsets=writer.offsets,
    )


def cut_into_waves(
    blocks: Sequence[TableBlock], hold: int
) -> Iterator[tuple[list[TableBlock], int]]:
    """Yield the blocks of each wave, with the size of their Ĝ.

    Two waves run at a time: products of one, and grafting of the previous one.
    """
    wave: list[TableBlock] = []
    total = 0
    for of_member in _runs(blocks):
        size = sum(map(held_size, of_member))
        if wave and total + size > hold // 2:
            yield wave, total
            wave, total = [], 0
        wave += of_member
        total += size
    yield wave, total


def _runs(blocks: Sequence[TableBlock]) -> Iterator[list[TableBlock]]:
    """Yield the blocks of each member."""
    run: list[TableBlock] = []
    for block in blocks:
        if run and run[0].member != block.member:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def held_size(block: TableBlock) -> int:
    """Return the elements of Ĝ of a block, padded."""
    m, n = map(padded, block.group.shape)
    return m * n


def cut_into_chunks(
    blocks: Sequence[TableBlock], precision: Precision, scratch: int, hold: int | None
) -> Iterator[list[TableBlock]]:
    """Cut the blocks of a wave into chunks, all wide or none; one block may exceed the scratch."""
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


@dataclass(frozen=True)
class _ProgramList:
    """A list of programs in the table of all lists: from ``start`` to ``stop``, by rows."""

    start: int
    stop: int
    width: int

    def of(self, table: Tensor) -> Tensor:
        """Return the list in a table on the device."""
        return table[self.start : self.stop].view(-1, self.width)


class _ProgramLists:
    """Lists of programs in one table: one copy to the device is faster than many."""

    def __init__(self) -> None:
        self.integers = array("i")

    def add(self, counts: Iterable[tuple[tuple[int, ...], int]]) -> _ProgramList:
        """Add a list in which every item has a number of programs."""
        start, first, width = len(self.integers), 0, 0
        for item, count in counts:
            self.integers.extend(array("i", (*item, first)) * count)
            first, width = first + count, len(item) + 1
        stop = len(self.integers)
        self.integers.extend((0,) * (-stop % 4))  # the next one begins at a multiple of 16 bytes
        return _ProgramList(start, stop, width)


@dataclass(frozen=True)
class _ChunkDraft:
    """A ``Chunk`` whose lists are not on the device yet."""

    blocks: tuple[TableBlock, ...]
    roots: dict[RootKind, _ProgramList]
    strips: range
    tiles: _ProgramList
    square: int
    lane: int

    def chunk(self, table: Tensor) -> Chunk:
        """Return the chunk, with its lists from a table on the device."""
        return Chunk(
            blocks=self.blocks,
            roots=tuple((kind, programs.of(table)) for kind, programs in self.roots.items()),
            strips=self.strips,
            wide=self.blocks[0].wide,
            tiles=self.tiles.of(table),
            square=self.square,
            lane=self.lane,
        )


class _Writer:
    """Writes lines and lists, chunk by chunk.

    Attributes:
        lines, members, offsets: Contents of ``Tables``.
        strips: (block,), and the number of programs that gather or scatter its rows.
        squares: Number of programs that compute products.
        lists: Lists of programs.
    """

    def __init__(self, precision: Precision, shape: Shape) -> None:
        self._precision, self._shape = precision, shape
        self.lines, self.members = array("q"), array("i")
        self.strips: list[tuple[tuple[int], int]] = []
        self._strip_count = self.squares = 0
        self.offsets: dict[TableBlock, int] = {}
        self.lists = _ProgramLists()

    def chunk(self, piece: Sequence[TableBlock], lane: int, place: int, held: int) -> _ChunkDraft:
        """Add blocks whose scratch begins at ``place``, and whose Ĝ are held from ``held`` on."""
        first_line, first_strip, square = len(self.lines) // COUNT, self._strip_count, self.squares
        kinds: dict[RootKind, list[tuple[tuple[int, int], int]]] = {}
        counts = []
        for line, block in enumerate(piece, first_line):
            self.offsets[block] = held
            self.lines.extend(_line(block, self._precision, place, held))
            place, held = place + block.scratch(self._precision), held + held_size(block)
            for side, factors in enumerate((block.group.left, block.group.right)):
                kind = RootKind.of(factors)
                kinds.setdefault(kind, []).append(((line, side), kind.programs(factors.order)))
            rows = padded(block.group.shape[0]) // STRIP
            self.strips.append(((line,), rows))
            self._strip_count += rows
            counts.append(((line,), self._add_squares(block)))
        roots = {kind: self.lists.add(programs) for kind, programs in kinds.items()}
        tiles, strips = self.lists.add(counts), range(first_strip, self._strip_count)
        return _ChunkDraft(tuple(piece), roots, strips, tiles, square, lane)

    def _add_squares(self, block: TableBlock) -> int:
        """Count the programs of a block's product, and add them to its member's."""
        (m, n), (rows, columns) = block.group.shape, self._shape.tile
        count = -(-m // rows) * -(-n // columns)
        if not self.members or self.members[-3] != block.member:
            self.members.extend((block.member, self.squares, self.squares))
        self.squares += count
        self.members[-1] = self.squares
        return count


def _line(block: TableBlock, precision: Precision, place: int, held: int) -> list[int]:
    m, n = block.group.shape
    pm, pn = padded(m), padded(n)
    line = block_head(block.member, (m, n), block.first, block.stride, block.taps)
    line += [0] * (COUNT - len(line))
    line[Field.LEFT] = place
    line[Field.RIGHT] = place + precision.parts * pm * pm
    line[Field.Y] = line[Field.RIGHT] + precision.parts * pn * pn
    line[Field.X] = line[Field.Y] + precision.parts * pm * pn
    line[Field.HELD] = held
    for side, factors in enumerate((block.group.left, block.group.right)):
        for field, value in _root(factors, block.row).items():
            line[field + side * OTHER_SIDE] = value
    return line


def _root(factors: Factors, row: int) -> dict[Field, int]:
    """Return the addresses of a root. At 32 bits, every (n + 1)-th element is the diagonal."""
    if factors.format.root.bits == 32:
        address = _address(factors, "root", row)
        return {
            Field.CODES: address,
            Field.DIAGONAL: address,
            Field.DIAGONAL_STRIDE: factors.order + 1,
        }
    fields = {
        Field.CODES: _address(factors, "root_codes", row),
        Field.SCALES: _address(factors, "root_scales", row),
        Field.DIAGONAL: _address(factors, "root_diagonal", row),
        Field.DIAGONAL_STRIDE: 1,
    }
    if "root_top_scales" in factors.tensors:
        fields[Field.TOPS] = _address(factors, "root_top_scales", row)
    return fields


def _address(factors: Factors, name: str, row: int) -> int:
    tensor = factors.tensors[name]
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
