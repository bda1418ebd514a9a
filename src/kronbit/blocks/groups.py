"""Blocks of one shape form a group: row i of every stack is one block.

The blocks of a group also share formats and start value, so one tensor can hold their state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.blocking import Blocking, Grid
from kronbit.config import Config, Format
from kronbit.factors import Factors
from kronbit.rules import Rule

# Shape, format of the left side, format of the right side, start value of a group.
_Key: TypeAlias = tuple[tuple[int, int], Format, Format, float]

_BATCH = 2**23  # largest number of elements in the larger factors of one turn
_SIMILAR, _FEW = 2 / 3, 1 / 8  # fractions of the largest order of a turn, and of _BATCH


@dataclass(frozen=True)
class Member:
    """A parameter as the preconditioner sees it.

    Attributes:
        blocking: The cut into blocks.
        config: The options when the state was made. They determine formats and start value; all
            other options are those of the step.
    """

    blocking: Blocking
    config: Config


@dataclass(frozen=True)
class Span:
    """The rows of a group that hold one grid of one member, from row ``start`` on."""

    member: int
    grid: Grid
    start: int

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + len(self.grid)


class Turn(NamedTuple):
    """The point in an interval at which a statistic and its root are due, under ``stagger``.

    Attributes:
        phase: Position of the block in the interval, in [0, 1).
        right: True for R, which comes after L.
    """

    phase: float
    right: bool


@dataclass(frozen=True)
class Due:
    """The blocks of a member that are updated or refreshed at a step.

    Attributes:
        config: The member's options at this step.
        turns: The turns that are due; ``None`` for both sides of all blocks.
    """

    config: Config
    turns: frozenset[Turn] | None = None


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a group that belong to one member and have one phase."""

    start: int
    stop: int
    member: int
    phase: float


class Piece(NamedTuple):
    """Rows of a group that are one strided view of a gradient.

    Attributes:
        member: The member that has the gradient.
        grid: The grid of the blocks.
        box: The blocks, as slices of the grid.
        place: The blocks, as a slice of a stack of the requested rows.
        dims: Number of blocks along each axis of the grid.
    """

    member: int
    grid: Grid
    box: tuple[slice, ...]
    place: slice
    dims: list[int]


class Pieces(dict[tuple[int, int], tuple[Piece, ...]]):
    """The pieces of every range (start, stop) of rows, computed at the first request.

    Args:
        spans: The spans of the group, in row order.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__()
        self._spans = spans

    def __missing__(self, rows: tuple[int, int]) -> tuple[Piece, ...]:
        self[rows] = pieces = tuple(self._cut(*rows))
        return pieces

    def _cut(self, first: int, last: int) -> Iterator[Piece]:
        number = bisect_right(self._spans, first, key=lambda span: span.start) - 1
        for span in self._spans[number:]:
            if span.start >= last:
                break
            start, stop = max(first, span.start), min(last, span.stop)
            place = start - first
            for box in boxes(span.grid.dims, start - span.start, stop - span.start):
                dims = [side.stop - side.start for side in box]
                count = math.prod(dims)
                yield Piece(span.member, span.grid, box, slice(place, place + count), dims)
                place += count


@dataclass
class Group:
    """Blocks of one shape (m, n) and one format.

    Attributes:
        shape: (m, n).
        left: L and L̂, order m.
        right: R and R̂, order n.
        spans: The rows of each grid of each member, in row order.
        owner: The member of each row, on the device.
        number: The number of each row's block among all blocks of the device, on the device.
            Blocks are counted member by member.
        segments: The rows by member and phase, in row order.
        pieces: (start, stop) -> the strided views of gradients that hold these rows.
    """

    shape: tuple[int, int]
    left: Factors
    right: Factors
    spans: tuple[Span, ...]
    owner: Tensor
    number: Tensor
    segments: tuple[Segment, ...]
    pieces: Pieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.spans)

    def runs(self, wanted: Mapping[int, Due], right: bool) -> Iterator[tuple[slice, Config]]:
        """Yield maximal ranges of rows of one side that are due with equal options."""
        start, current = 0, None
        for segment in self.segments:
            due = wanted.get(segment.member)
            turn = Turn(segment.phase, right)
            here = due is not None and (due.turns is None or turn in due.turns)
            config = due.config if due is not None and here else None
            if config == current:
                continue
            if current is not None:
                yield slice(start, segment.start), current
            start, current = segment.start, config
        if current is not None:
            yield slice(start, self.segments[-1].stop), current

    def places(self, members: Sequence[Member]) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield the location of each row's block in its gradient.

        Yields:
            The row, its member, the number of the block within the member, the offset of the
            block in the gradient, the stride between its rows, and its taps.
        """
        for span in self.spans:
            blocking = members[span.member].blocking
            _, M, N = blocking.matrices
            for row, block in enumerate(span.grid.blocks(), span.start):
                first = (block.batch * M + block.row) * N + block.column
                yield row, span.member, block.index, first, N, blocking.taps


def chunks(rows: slice, size: int) -> Iterator[slice]:
    """Yield ranges of at most ``size`` rows that cover a range."""
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def make_groups(members: Sequence[Member], device: torch.device) -> list[Group]:
    """Group the blocks of all members and allocate their factors.

    Args:
        members: The parameters, in order; rows follow that order.
        device: Device of the parameters.
    """
    spans: dict[_Key, list[Span]] = {}
    first_number = [0]
    for index, member in enumerate(members):
        first_number.append(first_number[-1] + len(member.blocking))
        for grid in member.blocking.grids:
            left, right = map(member.config.format, grid.shape)
            key: _Key = (grid.shape, left, right, member.config.start_value)
            earlier = spans.setdefault(key, [])
            earlier.append(Span(index, grid, earlier[-1].stop if earlier else 0))
    offload = any(member.config.offload_statistics for member in members)
    stacks = _stacks(spans, device, offload)
    groups = []
    places, count = _places_in_interval(spans)
    for key, of_group in spans.items():
        segments = tuple(_segments(of_group, places[key], count))
        blocks = [(span.member, block.index) for span in of_group for block in span.grid.blocks()]
        groups.append(
            Group(
                shape=key[0],
                left=stacks[key][0],
                right=stacks[key][1],
                spans=tuple(of_group),
                owner=torch.tensor([member for member, _ in blocks], device=device),
                number=torch.tensor([first_number[i] + j for i, j in blocks], device=device),
                segments=segments,
            )
        )
    return groups


def _stacks(
    spans: Mapping[_Key, Sequence[Span]], device: torch.device, offload: bool
) -> dict[_Key, tuple[Factors, Factors]]:
    """Allocate both sides' factors of each group.

    Factors of one order, format and start value are windows of one stack.
    """
    rows: Counter[tuple[int, Format, float]] = Counter()
    for (shape, *formats, start), of_group in spans.items():
        for order, format in zip(shape, formats, strict=True):
            rows[order, format, start] += of_group[-1].stop
    whole = {
        (order, format, start): Factors(order, count, format, start, device, offload)
        for (order, format, start), count in rows.items()
    }
    used: Counter[tuple[int, Format, float]] = Counter()

    def window(order: int, format: Format, start: float, count: int) -> Factors:
        key = (order, format, start)
        used[key] += count
        return whole[key].window(used[key] - count, count)

    return {
        key: (
            window(key[0][0], key[1], key[3], of_group[-1].stop),
            window(key[0][1], key[2], key[3], of_group[-1].stop),
        )
        for key, of_group in spans.items()
    }


def _places_in_interval(spans: Mapping[_Key, Sequence[Span]]) -> tuple[dict[_Key, list[int]], int]:
    """Assign each group's rows to places in the interval; return these and the number of places.

    The rows of one place keep a GPU busy. Large blocks come first, so that the blocks of a place
    have similar orders and can share batches, unless there are only a few of them.
    """
    assigned: dict[_Key, list[int]] = {}
    place = filled = largest = 0
    for key in sorted(spans, key=lambda key: max(key[0]), reverse=True):
        order = max(key[0])
        assigned[key] = []
        for _ in range(spans[key][-1].stop):
            much_smaller = order < largest * _SIMILAR and filled >= _BATCH * _FEW
            if filled and (much_smaller or filled + order**2 > _BATCH):
                place, filled = place + 1, 0
            largest = largest if filled else order
            assigned[key].append(place)
            filled += order**2
    return assigned, place + 1


def _segments(spans: Sequence[Span], places: Sequence[int], count: int) -> Iterator[Segment]:
    """Cut the rows of a group where the member or the place changes."""
    for span in spans:
        start = span.start
        for place, rows in groupby(places[span.start : span.stop]):
            stop = start + len(list(rows))
            yield Segment(start, stop, span.member, place / count)
            start = stop


@dataclass(frozen=True, eq=False)
class DeviceStacks:
    """All stacks of one device: the part of a preconditioner that kernels and ranks work on.

    Attributes:
        members: The parameters, in order.
        groups: Their blocks.
        rule: (L̂, G, R̂) -> Ĝ.
        workspace: Bound of transient memory in bytes.
        device: The device.
        graft_ratio: ‖G‖ / ‖Ĝ‖ of each member when it was last preconditioned, on the device.
        ungrafted: Number of times that F received G because Ĝ had overflowed, on the device.
        refreshed: Members with a root that is not the identity; updated in place.
    """

    members: tuple[Member, ...]
    groups: tuple[Group, ...]
    rule: Rule
    workspace: int
    device: torch.device
    graft_ratio: Tensor
    ungrafted: Tensor
    refreshed: set[int]


def make_stacks(
    members: Sequence[Member], rule: Rule, workspace: int, device: torch.device
) -> DeviceStacks:
    """Allocate the state of all members of a device."""
    return DeviceStacks(
        tuple(members),
        tuple(make_groups(members, device)),
        rule,
        workspace,
        device,
        graft_ratio=torch.ones(len(members), dtype=torch.float32, device=device),
        ungrafted=torch.zeros((), dtype=torch.int64, device=device),
        refreshed=set(),
    )


def boxes(dims: tuple[int, ...], start: int, stop: int) -> tuple[tuple[slice, ...], ...]:
    """Cover the flat range [start, stop) of a row-major grid with boxes, in order.

    A range of rows may begin and end in the middle of a grid; each box is one strided view.
    """
    if start >= stop:
        return ()
    if len(dims) == 1:
        return ((slice(start, stop),),)
    inner = math.prod(dims[1:])
    first, offset = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if first == last:
        return _under(first, boxes(dims[1:], offset, rest))
    head = _under(first, boxes(dims[1:], offset, inner)) if offset else ()
    body_start = first + 1 if offset else first
    body = (
        ((slice(body_start, last), *(slice(0, d) for d in dims[1:])),) if body_start < last else ()
    )
    return (*head, *body, *_under(last, boxes(dims[1:], 0, rest)))


def _under(line: int, inner: tuple[tuple[slice, ...], ...]) -> tuple[tuple[slice, ...], ...]:
    return tuple((slice(line, line + 1), *box) for box in inner)
