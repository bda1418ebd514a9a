"""Blocks of one shape form a group: row i of every stack is one block.

(Of one shape, one format and one start value, to be exact: what a single tensor can hold.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronbit.blocking import Blocking, Grid, boxes
from kronbit.config import Config, Format
from kronbit.factors import Factors


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
    """

    shape: tuple[int, int]
    left: Factors
    right: Factors
    spans: tuple[Span, ...]
    owner: Tensor
    number: Tensor

    def runs(self, wanted: Mapping[int, Config]) -> Iterator[tuple[slice, Config]]:
        """Maximal ranges of neighbouring rows whose members are wanted with equal options."""
        start, current = 0, None
        for span in self.spans:
            config = wanted.get(span.member)
            if config == current:
                continue
            if current is not None:
                yield slice(start, span.start), current
            start, current = span.start, config
        if current is not None:
            yield slice(start, self.spans[-1].stop), current

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


def make_groups(members: Sequence[Member], p: int, device: torch.device) -> list[Group]:
    """Group the blocks of all members and allocate their factors.

    Args:
        members: The parameters, in order; rows follow that order.
        p: The roots are L^(-1/p) and R^(-1/p).
        device: Where the parameters live.
    """
    spans: dict[tuple[tuple[int, int], Format, Format, float], list[Span]] = {}
    first_number = [0]
    for index, member in enumerate(members):
        first_number.append(first_number[-1] + len(member.blocking))
        for grid in member.blocking.grids:
            left, right = map(member.config.format, grid.shape)
            key = (grid.shape, left, right, member.config.damping)
            earlier = spans.setdefault(key, [])
            earlier.append(Span(index, grid, earlier[-1].stop if earlier else 0))
    groups = []
    for ((m, n), left, right, start), own in spans.items():
        blocks = [(span.member, block.index) for span in own for block in span.grid.blocks()]
        groups.append(
            Group(
                shape=(m, n),
                left=Factors(m, len(blocks), left, p, start, device),
                right=Factors(n, len(blocks), right, p, start, device),
                spans=tuple(own),
                owner=torch.tensor([member for member, _ in blocks], device=device),
                number=torch.tensor([first_number[i] + j for i, j in blocks], device=device),
            )
        )
    return groups
