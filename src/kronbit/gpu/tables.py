"""Tables that tell the grouped kernels which blocks there are, and which program does what.

They depend on the plan alone, so they are made once. Gradients move from step to step: their
addresses are a small table of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kronbit.blocks.groups import DeviceStacks
from kronbit.factors import Factors
from kronbit.factors.compact_storage import CompactStorage
from kronbit.gpu.addresses import to_device
from kronbit.gpu.cutting import (
    LANES,
    Precision,
    Shape,
    TableBlock,
    cut_into_chunks,
    cut_into_waves,
    held_size,
)
from kronbit.kernels.lines import COUNT, OTHER_SIDE, STRIP, Field, block_head
from kronbit.kernels.roots import tiles_per_program
from kronbit.kernels.split import PAD, padded
from kronbit.quantization import Quantizer


class RootKind(NamedTuple):
    """What a kernel that restores roots is made for.

    Attributes:
        quantizer: Q and D.
        words: Whether eight codes are a word of their own, as those of a row of a multiple of
            eight are.
        compact: Whether one triangle is kept, and scales are quantised.
        tile: The side of its tiles; 0 if it is kept by rows.
    """

    quantizer: Quantizer
    words: bool
    compact: bool
    tile: int

    @classmethod
    def of(cls, factors: Factors) -> RootKind:
        """Of a stack."""
        storage, order = factors.method.root, factors.order
        own = storage.quantizer
        if isinstance(storage, CompactStorage):
            return cls(own, words=False, compact=True, tile=storage.tile(order) or 0)
        words = own.bits == 4 and own.block_size % 8 == 0 and order % 8 == 0
        return cls(own, words=words, compact=False, tile=0)

    def programs(self, order: int) -> int:
        """How many programs restore a root."""
        if not self.tile:
            return padded(order) // STRIP
        side = padded(order) // self.tile
        return -(-(side * (side + 1) // 2) // tiles_per_program(self.tile))


@dataclass(frozen=True)
class Chunk:
    """Blocks that go through the scratch together.

    Attributes:
        blocks: The blocks.
        roots: Of each kind of root: (block, side, first) of each program that restores. The first
            is that of the block's programs, here and below.
        strips: Which of the tables' programs gather or scatter its rows.
        wide: Whether rows of gradients begin and end at multiples of 8 elements, all or none.
        tiles: (block, first) of each program of a product.
        square: Where its programs' sums of squares begin.
        lane: Whose scratch it uses.
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
        members: Which of the tables'.
        chunks: Its blocks in order.
        fits: Whether Ĝ of the wave is held until it is grafted; else it is computed twice.
        alone: Whether it may need all of the held stack; two others have a half each.
    """

    members: range
    chunks: tuple[Chunk, ...]
    fits: bool
    alone: bool


@dataclass(frozen=True)
class Tables:
    """What there is to do for some members.

    Attributes:
        lines: The blocks' lines of integers.
        members: (member, first, one past the last of its squares) of each.
        strips: (block, first) of each program that gathers or scatters rows.
        waves: In order.
        shape: How products are cut.
        squares: How many programs compute products.
        scratch: Elements of all lanes' scratch.
        held: Elements of the held stack.
        offsets: Where Ĝ of each block begins in it.
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
        stacks: Members, blocks and workspace: three eighths of that are scratch; the rest
            holds Ĝ.
        wanted: Which of the members.
        precision: How much scratch they need.
        channels_last: Whose gradients are in that order.
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
    # Of a chunk; of one whose wave does not fit, Ĝ, too, has room only as long as it is under way.
    scratch = workspace * 3 // 8 // 2 // LANES
    pieces = [
        list(cut_into_chunks(wave, precision, scratch, hold // LANES if size > hold else None))
        for wave, size in waves
    ]
    lane_size = max(
        sum(block.scratch(precision) for block in piece) for wave in pieces for piece in wave
    )
    writer = _Writer(precision, shape)
    makers, number = [], 0
    for turn, ((_, size), wave) in enumerate(zip(waves, pieces, strict=True)):
        fits, alone = size <= hold, size > hold // 2
        held = 0 if alone else turn % 2 * (hold // 2)
        lane_held = max(sum(map(held_size, piece)) for piece in wave)
        first_member, chunks = len(writer.members) // 3, []
        for piece in wave:
            lane, number = number % LANES, number + 1
            if not fits:
                held = lane * lane_held
            chunks.append(writer.chunk(piece, lane, lane * lane_size, held))
            held += sum(map(held_size, piece))
        makers.append((range(first_member, len(writer.members) // 3), chunks, fits, alone))
    strips = writer.lists.add(writer.strips)
    table = to_device(writer.lists.integers, device).view(-1)
    return Tables(
        lines=to_device(writer.lines, device, COUNT),
        members=to_device(writer.members, device, 3),
        strips=strips(table),
        waves=tuple(
            TableWave(own, tuple(make(table) for make in chunks), fits, alone)
            for own, chunks, fits, alone in makers
        ),
        shape=shape,
        squares=writer.squares,
        scratch=min(LANES, number) * lane_size,
        held=max(held_size(block) + offset for block, offset in writer.offsets.items()),
        offsets=writer.offsets,
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


class _Writer:
    """Writes lines and lists, chunk by chunk.

    Attributes:
        lines, members: As tables have them.
        strips: (block,), and how many programs gather or scatter its rows.
        squares: How many programs compute products.
        offsets: As ``Tables`` has them.
        lists: Of the programs.
    """

    def __init__(self, precision: Precision, shape: Shape) -> None:
        self._precision, self._shape = precision, shape
        self.lines, self.members = array("q"), array("i")
        self.strips: list[tuple[tuple[int], int]] = []
        self._strip_count = self.squares = 0
        self.offsets: dict[TableBlock, int] = {}
        self.lists = _ProgramLists()

    def chunk(
        self, piece: Sequence[TableBlock], lane: int, place: int, held: int
    ) -> Callable[[Tensor], Chunk]:
        """Add blocks whose scratch begins at some place, and whose Ĝ are held from another on.

        Returns:
            What makes the chunk, once the lists are on the device.
        """
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
        return lambda table: Chunk(
            blocks=tuple(piece),
            roots=tuple((kind, find(table)) for kind, find in roots.items()),
            strips=strips,
            wide=piece[0].wide,
            tiles=tiles(table),
            square=square,
            lane=lane,
        )

    def _add_squares(self, block: TableBlock) -> int:
        """Count the programs of a block's product, also among its member's."""
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
    """Addresses of a root. A 32-bit one is its own diagonal, at every (n + 1)-th element."""
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
