"""Tables of the ordinary step: its blocks, and the work of every program.

Members are cut into waves, which are grafted together; waves into chunks, which share the scratch;
and chunks into programs. Tables depend on the plan alone, so they are made once. The addresses of
gradients change from step to step and are in a small table of ``addresses``.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kronbit.blocks.groups import DeviceStacks, Group
from kronbit.factors import Factors
from kronbit.factors.storage import CompactStorage
from kronbit.gpu.addresses import to_device
from kronbit.gpu.precision import Precision
from kronbit.kernels.grouped import COUNT, STRIP, tiles_per_program
from kronbit.kernels.split import padded
from kronbit.quantization import Quantizer

# Shapes of the programs of a product: rows and columns of a program's result, as much as fits into
# its registers; and columns of the left operand that are multiplied together.
_SMALL = {"TILE_M": 128, "TILE_N": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
_LARGE = {"TILE_M": 128, "TILE_N": 256, "DEPTH": 64, "num_warps": 8, "num_stages": 3}
_PRECISE = {"TILE_M": 64, "TILE_N": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}


def _shape(precision: Precision, blocks: Sequence[TableBlock]) -> dict[str, int]:
    """Return the shape of programs for products of blocks.

    Larger tiles read less, but waste more at the edges.
    """
    if precision.precise:
        return _PRECISE
    small, large = (
        sum(_tiles(block, shape) * shape["TILE_M"] * shape["TILE_N"] for block in blocks)
        for shape in (_SMALL, _LARGE)
    )
    return _LARGE if large <= 1.1 * small else _SMALL


def _tiles(block: TableBlock, shape: dict[str, int]) -> int:
    """Return the number of programs of a block's product."""
    m, n = block.group.shape
    return -(-m // shape["TILE_M"]) * -(-n // shape["TILE_N"])


@dataclass(frozen=True, eq=False)  # two blocks are never the same
class TableBlock:
    """A block and its location in the gradient: ``first`` element, and ``stride`` between rows.

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
        """True if rows of the gradient are contiguous, and begin and end at multiples of 8."""
        lengths = (self.group.shape[1], self.first, self.stride)
        return not self.channels_last and all(length % 8 == 0 for length in lengths)

    def scratch(self, precision: Precision) -> int:
        """Return the scratch in elements: two roots, Y, and X unless it is the gradient itself."""
        m, n = map(padded, self.group.shape)
        copies = 1 if precision.direct and self.wide else 2
        return precision.parts * (m * m + n * n + copies * m * n)


class RootKind(NamedTuple):
    """Storage of roots, for which a variant of the kernel is compiled.

    Attributes:
        quantizer: Q and D.
        words: True if eight codes are read as a word: rows have a multiple of eight elements.
        compact: True if only one triangle is stored, and scales are quantised.
        tile: The side of the tiles; 0 if roots are stored by rows.
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


class Chunk(NamedTuple):
    """Blocks that share the scratch.

    Attributes:
        blocks: The blocks.
        roots: For each kind of root, the index of a list of programs that restore roots. A program
            is (block, side, first), where ``first`` is the first program of the block.
        strips: Range, in the last list of programs, of those that move the chunk's rows.
        wide: True if the rows of all gradients are wide, False if none are.
        tiles: Index of the list of a product's programs, each (block, first).
        square: Index of the first program's sum of squares.
    """

    blocks: tuple[TableBlock, ...]
    roots: tuple[tuple[RootKind, int], ...]
    strips: range
    wide: bool
    tiles: int
    square: int


class TableWave(NamedTuple):
    """Members that are grafted together.

    Attributes:
        members: Range of the tables' members.
        chunks: The wave's blocks in order.
        fits: True if Ĝ of the wave is held until it is grafted; else Ĝ is computed twice.
    """

    members: range
    chunks: tuple[Chunk, ...]
    fits: bool


class Tables(NamedTuple):
    """Tables of an ordinary step.

    Attributes:
        lines: The blocks' lines of integers.
        members: For each member, (member, first, one past the last) of its sums of squares.
        programs: The chunks' lists of programs; the last list has (block, first) of each program
            that gathers or scatters rows.
        waves: The waves, in order.
        shape: Shape of the programs of products.
        squares: Number of programs that compute products.
        scratch: Elements of the scratch.
        held: Elements of the held stack.
        offsets: First element of Ĝ of each block in the held stack.
    """

    lines: Tensor
    members: Tensor
    programs: list[Tensor]
    waves: tuple[TableWave, ...]
    shape: dict[str, int]
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
    """Cut members into waves so that Ĝ of a wave and scratch of a chunk fit into the workspace.

    Args:
        stacks: Members, blocks and workspace. Scratch takes 3/8 of the workspace, and Ĝ 5/8.
        wanted: Indices of the members.
        precision: Precision of the products.
        channels_last: Members whose gradients are in channels-last order.
    """
    members, workspace, device = stacks.members, stacks.workspace, stacks.device
    blocks = [
        TableBlock(member, number, group, row, first, stride, taps, member in channels_last)
        for group in stacks.groups
        for row, member, number, first, stride, taps in group.locate(members)
        if member in wanted
    ]
    blocks.sort(key=lambda block: (block.member, block.number))
    shape = _shape(precision, blocks)
    hold = workspace * 5 // 8 // precision.held.itemsize
    writer, waves = _Writer(precision, shape), []
    for wave in cut_into_waves(blocks, hold):
        fits, first = sum(map(held_size, wave)) <= hold, len(writer.members) // 3
        # If the wave does not fit, Ĝ is held only while a chunk is computed.
        most = None if fits else hold
        held, chunks = 0, []
        for piece in cut_into_chunks(wave, precision, workspace * 3 // 8 // 2, most):
            chunks.append(writer.chunk(piece, held))
            held += sum(map(held_size, piece)) * fits
        waves.append(TableWave(range(first, len(writer.members) // 3), tuple(chunks), fits))
    return Tables(
        lines=to_device(writer.lines, device, COUNT),
        members=to_device(writer.members, device, 3),
        programs=_on_device([*writer.programs, writer.strips], device),
        waves=tuple(waves),
        shape=shape,
        squares=writer.squares,
        scratch=writer.scratch,
        held=max(held_size(block) + offset for block, offset in writer.offsets.items()),
        offsets=writer.offsets,
    )


def cut_into_waves(blocks: Sequence[TableBlock], hold: int) -> Iterator[list[TableBlock]]:
    """Yield the blocks of each wave: as many members as fit, at least one."""
    wave: list[TableBlock] = []
    total = 0
    for _, run in groupby(blocks, key=lambda block: block.member):
        of_member = list(run)
        size = sum(map(held_size, of_member))
        if wave and total + size > hold:
            yield wave
            wave, total = [], 0
        wave += of_member
        total += size
    yield wave


def held_size(block: TableBlock) -> int:
    """Return the number of elements of a block's padded Ĝ."""
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


def _on_device(lists: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> list[Tensor]:
    """Copy lists to a device in one copy, which is faster. Each list is aligned to 16 bytes."""
    table, starts = array("i"), []
    for rows in lists:
        starts.append(len(table))
        table.extend(chain.from_iterable(rows))
        table.extend((0,) * (-len(table) % 4))
    whole = to_device(table, device).view(-1)
    return [
        whole[start : start + len(rows) * len(rows[0])].view(len(rows), -1)
        for start, rows in zip(starts, lists, strict=True)
    ]


class _Writer:
    """Writes lines and lists, chunk by chunk.

    Attributes:
        lines, members, offsets: Contents of ``Tables``.
        programs: All lists of programs but the last.
        strips: The last list of programs.
        squares: Number of programs that compute products.
        scratch: Elements of the scratch of the largest chunk.
    """

    def __init__(self, precision: Precision, shape: dict[str, int]) -> None:
        self._precision, self._shape = precision, shape
        self.lines, self.members = array("q"), array("i")
        self.programs: list[list[tuple[int, ...]]] = []
        self.strips: list[tuple[int, ...]] = []
        self.squares = self.scratch = 0
        self.offsets: dict[TableBlock, int] = {}

    def chunk(self, piece: Sequence[TableBlock], held: int) -> Chunk:
        """Add a chunk of blocks, whose Ĝ begin at element ``held`` of the held stack."""
        offset = 0  # in the scratch
        first_strip, first_list, square = len(self.strips), len(self.programs), self.squares
        roots: dict[RootKind, list[tuple[int, ...]]] = {}
        tiles: list[tuple[int, ...]] = []
        for line, block in enumerate(piece, len(self.lines) // COUNT):
            self.offsets[block] = held
            self.lines.extend(_line(block, self._precision, offset, held))
            offset, held = offset + block.scratch(self._precision), held + held_size(block)
            for side, factors in enumerate((block.group.left, block.group.right)):
                kind = RootKind.of(factors)
                programs = roots.setdefault(kind, [])
                programs += [(line, side, len(programs))] * kind.programs(factors.order)
            self.strips += [(line, len(self.strips))] * (padded(block.group.shape[0]) // STRIP)
            tiles += [(line, len(tiles))] * self._add_squares(block)
        self.programs += [*roots.values(), tiles]
        self.scratch = max(self.scratch, offset)
        return Chunk(
            blocks=tuple(piece),
            roots=tuple((kind, number) for number, kind in enumerate(roots, first_list)),
            strips=range(first_strip, len(self.strips)),
            wide=piece[0].wide,
            tiles=len(self.programs) - 1,
            square=square,
        )

    def _add_squares(self, block: TableBlock) -> int:
        """Return the number of programs of a block's product, and add it to the member's."""
        count = _tiles(block, self._shape)
        if not self.members or self.members[-3] != block.member:
            self.members.extend((block.member, self.squares, self.squares))
        self.squares += count
        self.members[-1] = self.squares
        return count


def _line(block: TableBlock, precision: Precision, left: int, held: int) -> list[int]:
    """Return the fields of ``kernels.gradients`` and ``kernels.grouped``."""
    m, n = map(padded, block.group.shape)
    right = left + precision.parts * m * m
    y = right + precision.parts * n * n
    x = y + precision.parts * m * n
    head = block.member, *block.group.shape, block.first, block.stride, block.taps
    roots = (_root(factors, block.row) for factors in (block.group.left, block.group.right))
    return [*head, left, right, x, y, held, *chain.from_iterable(roots)]


def _root(factors: Factors, row: int) -> tuple[int, ...]:
    """Return the fields of a root. At 32 bits, every (n + 1)-th element is on the diagonal."""
    if factors.format.root.bits == 32:
        address = _address(factors, "root", row)
        return address, 0, 0, address, factors.order + 1
    tops = "root_top_scales"
    return (
        _address(factors, "root_codes", row),
        _address(factors, "root_scales", row),
        _address(factors, tops, row) if tops in factors.tensors else 0,
        _address(factors, "root_diagonal", row),
        1,
    )


def _address(factors: Factors, name: str, row: int) -> int:
    tensor = factors.tensors[name]
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
