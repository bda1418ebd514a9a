"""Blocks of one shape form a group: row i of every stack is one block.

(Of one shape, one format and one start value, to be exact: what a single tensor can hold.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.blocking import Blocking, Grid
from kronbit.config import Config, Format
from kronbit.factors import Factors
from kronbit.rules import Rule

# What the blocks of a group have in common: their shape, both sides' formats, the start value.
_Key: TypeAlias = tuple[tuple[int, int], Format, Format, float]

_BATCH = 2**23  # elements of the larger sides of blocks that have their turn together
_SIMILAR, _FEW = 2 / 3, 1 / 8  # parts of the largest order there, and of a batch


@dataclass(frozen=True)
class Member:
    """A parameter as the preconditioner sees it.

    Attributes:
        blocking: How it is cut.
        config: Its options when its state is made; the formats and the start value are taken
            from here, everything else from the options of the step.
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
    """When a statistic, and its inverse root, have their turn, if they are staggered.

    Attributes:
        phase: In [0, 1): the block's place in the interval.
        right: Whether it is R, which comes after L.
    """

    phase: float
    right: bool


@dataclass(frozen=True)
class Due:
    """Which blocks of a member have something to do at a step.

    Attributes:
        config: The member's options at this step.
        turns: Whose turn it is; ``None``: both sides of all blocks.
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


@dataclass
class Group:
    """Blocks of one shape (m, n) and one format.

    Attributes:
        shape: (m, n).
        left: L and L̂, order m.
        right: R and R̂, order n.
        spans: Which rows belong to whom, in row order.
        owner: The member of each row, on the device.
        number: The number of each row's block among all blocks of all members, on the device:
            members in order, and within a member the blocks in order.
        segments: The rows by member and phase, in row order.
    """

    shape: tuple[int, int]
    left: Factors
    right: Factors
    spans: tuple[Span, ...]
    owner: Tensor
    number: Tensor
    segments: tuple[Segment, ...]

    def runs(self, wanted: Mapping[int, Due], right: bool) -> Iterator[tuple[slice, Config]]:
        """Maximal ranges of neighbouring rows that are wanted with equal options, on one side."""
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
        """Where each row's block lies in its gradient.

        Yields:
            The row, its member, the block's number there, its first element in the gradient, the
            elements from one of its rows to the next, and taps.
        """
        for span in self.spans:
            own = members[span.member].blocking
            _, M, N = own.matrices
            for row, block in enumerate(span.grid.blocks(), span.start):
                first = (block.batch * M + block.row) * N + block.column
                yield row, span.member, block.index, first, N, own.taps

    def pieces(self, rows: slice) -> Iterator[tuple[Span, tuple[slice, ...], slice, list[int]]]:
        """Cut a range of rows into boxes, each of which is one strided view of a gradient.

        Yields:
            The span that a box belongs to; the box as slices of the span's grid; where its blocks
            are in a stack of just these rows; and how many blocks it has along each grid axis.
        """
        first = bisect_right(self.spans, rows.start, key=lambda span: span.start) - 1
        for span in self.spans[first:]:
            if span.start >= rows.stop:
                break
            start, stop = max(rows.start, span.start), min(rows.stop, span.stop)
            place = start - rows.start
            for box in boxes(span.grid.dims, start - span.start, stop - span.start):
                dims = [side.stop - side.start for side in box]
                count = math.prod(dims)
                yield span, box, slice(place, place + count), dims
                place += count


def chunks(rows: slice, size: int) -> Iterator[slice]:
    """Cut a range of rows into ranges of at most ``size``."""
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def make_groups(members: Sequence[Member], device: torch.device) -> list[Group]:
    """Group the blocks of all members and allocate their factors.

    Args:
        members: The parameters, in order; rows follow that order.
        device: Where the parameters live.
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
    for key, own in spans.items():
        segments = tuple(_segments(own, places[key], count))
        blocks = [(span.member, block.index) for span in own for block in span.grid.blocks()]
        groups.append(
            Group(
                shape=key[0],
                left=stacks[key][0],
                right=stacks[key][1],
                spans=tuple(own),
                owner=torch.tensor([member for member, _ in blocks], device=device),
                number=torch.tensor([first_number[i] + j for i, j in blocks], device=device),
                segments=segments,
            )
        )
    return groups


def _stacks(
    spans: Mapping[_Key, Sequence[Span]], device: torch.device, offload: bool
) -> dict[_Key, tuple[Factors, Factors]]:
    """Both sides' factors of each group. All of one order and format are one stack's windows."""
    rows: Counter[tuple[int, Format, float]] = Counter()
    for (shape, *formats, start), own in spans.items():
        for order, format in zip(shape, formats, strict=True):
            rows[order, format, start] += own[-1].stop
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
            window(key[0][0], key[1], key[3], own[-1].stop),
            window(key[0][1], key[2], key[3], own[-1].stop),
        )
        for key, own in spans.items()
    }


def _places_in_interval(spans: Mapping[_Key, Sequence[Span]]) -> tuple[dict[_Key, list[int]], int]:
    """The places of each group's rows in the interval, if they are staggered, and their number.

    The rows of a place are enough to keep a GPU busy. Large blocks come first, so that those of a
    place are of similar orders, and can share batches; unless there are only a few of them.
    """
    found: dict[_Key, list[int]] = {}
    place = filled = largest = 0
    for key in sorted(spans, key=lambda key: max(key[0]), reverse=True):
        order = max(key[0])
        found[key] = []
        for _ in range(spans[key][-1].stop):
            much_smaller = order < largest * _SIMILAR and filled >= _BATCH * _FEW
            if filled and (much_smaller or filled + order**2 > _BATCH):
                place, filled = place + 1, 0
            largest = largest if filled else order
            found[key].append(place)
            filled += order**2
    return found, place + 1


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
    """All stacks of one device: what kernels and other ranks need to know of a preconditioner.

    Attributes:
        members: The parameters, in order.
        groups: Their blocks.
        rule: (L̂, G, R̂) -> Ĝ.
        workspace: Bound of transient memory in bytes.
        device: The device.
        graft_ratio: ‖G‖ / ‖Ĝ‖ of each member when it was last preconditioned, on the device.
        ungrafted: How often F got G itself because Ĝ had overflowed, on the device.
        refreshed: Members with a root that is not the identity; grows in place.
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


@lru_cache(maxsize=65536)
def boxes(dims: tuple[int, ...], start: int, stop: int) -> tuple[tuple[slice, ...], ...]:
    """Cover the flat range [start, stop) of a row-major grid by boxes, in order.

    A chunk of a group may begin and end in the middle of a grid; each box is one strided view.
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
