"""Rows of equal order, from all groups, cut into batches that the workspace can take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kronbit.config import Config, Format
from kronbit.factors import Factors
from kronbit.groups import Due, Group

_MOST_ROWS = 65535  # of a batch: what a grid of programs can hold
_SMALL = 64  # orders below it may be mixed
_PAD = 64  # kernels fill up the sides of matrices to multiples of it


@dataclass(frozen=True)
class Cost:
    """Float32 matrices that one row of a batch needs at the peak.

    Attributes:
        square: Of the order, n x n (of the larger one, where both sides are at work).
        block: Of the gradient's shape, m x n.
        gathered: Of that shape, too, but before all that, beside a single square one.
    """

    square: int
    block: int = 0
    gathered: int = 0

    def rows(self, order: int, shape: tuple[int, int], workspace: int) -> int:
        """Rows of a batch that stays within the workspace; a single row may exceed it."""
        n, *sides = (-(-side // _PAD) * _PAD for side in (order, *shape))
        block = math.prod(sides)
        one = max(self.square * n**2 + self.block * block, n**2 + self.gathered * block)
        return max(1, min(_MOST_ROWS, workspace // (4 * one)))


# Counted over all methods and widths; tests/test_memory.py counts again.
UPDATE = Cost(square=5, gathered=1)
REFRESH = Cost(square=5)
NEWTON = Cost(square=10)
PRECONDITION = Cost(square=4, block=4)


@dataclass(frozen=True)
class Part:
    """Rows of one side of a group, with the options of the step."""

    group: Group
    right: bool
    rows: slice
    config: Config

    @property
    def factors(self) -> Factors:
        """That side's stack."""
        return self.group.right if self.right else self.group.left

    def row(self, row: int) -> Part:
        """One of the rows."""
        return replace(self, rows=slice(row, row + 1))


def due_parts(groups: Sequence[Group], due: Mapping[int, Due]) -> Iterator[Part]:
    """Both sides of all rows that are due."""
    for group in groups if due else ():
        for run, config in group.runs(due):
            yield Part(group, False, run, config)
            yield Part(group, True, run, config)


def order_of(parts: Sequence[Part]) -> int:
    """The order of a batch: the largest of its parts'."""
    return max(part.factors.order for part in parts)


def batches(
    parts: Iterable[Part],
    workspace: int,
    cost: Cost,
    newton: Cost | None = None,
    mixed: bool = False,
) -> Iterator[list[Part]]:
    """Batches of rows of equal order, format and options, each as large as the workspace allows.

    Few large batches: the time of an update is that of its launches, where matrices are small.

    Args:
        parts: The rows.
        workspace: In bytes.
        cost: What a row needs.
        newton: What it needs where roots are taken by Schur-Newton.
        mixed: Whether small orders may share a batch.
    """
    found: dict[tuple[int, Format, Config], list[Part]] = {}
    for part in parts:
        order = _SMALL if mixed and _can_be_enlarged(part) else part.factors.order
        found.setdefault((order, part.factors.format, part.config), []).append(part)
    for (_, format, config), own in found.items():
        order = order_of(own)
        own.sort(key=lambda part: (part.factors.order, part.factors.first + part.rows.start))
        largest = max((part.group.shape for part in own), key=math.prod)
        by_newton = format.method != "eigen" or config.root == "schur_newton"
        needs = newton if newton is not None and by_newton else cost
        if format.statistic.bits == 32:  # rows that are not neighbours are copied as they are
            needs = replace(needs, square=needs.square + 1)
        yield from _cut(own, needs.rows(order, largest, workspace))


def _can_be_enlarged(part: Part) -> bool:
    """Whether a matrix can be a part of a larger one, without a trace of that in its root."""
    format, config = part.factors.format, part.config
    return (
        part.factors.order < _SMALL
        and format.method == "eigen"
        and format.statistic.bits == format.root.bits == 32
        and config.root == "eigen"
        and config.beta > 0
    )


def _cut(parts: Sequence[Part], size: int) -> Iterator[list[Part]]:
    """Cut parts, and divide them where needed, into lists of at most ``size`` rows."""
    # Equal ones: no batch is left with a few rows that cannot fill the device.
    total = sum(part.rows.stop - part.rows.start for part in parts)
    size = -(-total // -(-total // size))
    batch: list[Part] = []
    room = size
    for part in parts:
        start = part.rows.start
        while start < part.rows.stop:
            stop = min(part.rows.stop, start + room)
            batch.append(replace(part, rows=slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch
