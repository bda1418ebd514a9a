"""Rows from all groups, cut into batches that fit into the workspace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kronbit.blocks.groups import Due, Group
from kronbit.config import Config, Format
from kronbit.factors import Batch, Factors
from kronbit.linalg.backend import backend
from kronbit.linalg.orthogonal import thousands
from kronbit.linalg.roots import LEAST_RIDGE

_MOST_ROWS = 65535  # of a batch: the limit of a grid of programs
_PADDED = 1 / 3  # of a batch may be padding
_PAD = 64  # kernels pad the sides of matrices to multiples of it


@dataclass(frozen=True)
class Cost:
    """Number of float32 matrices that one row of a batch needs at the peak.

    Attributes:
        square: Matrices n x n, where n is the order (the larger one, if both sides are used).
        block: Matrices m x n, the shape of the gradient.
        gathered: Matrices of that shape before the peak, beside one square matrix.
        cropped: True if kernels skip the padding of matrices.
    """

    square: int
    block: int = 0
    gathered: int = 0
    cropped: bool = False

    def rows(self, order: int, shape: tuple[int, int], workspace: int) -> int:
        """Return the rows of a batch within the workspace; a single row may exceed it."""
        n, *sides = (-(-side // _PAD) * _PAD for side in (order, *shape))
        block = math.prod(sides)
        one = max(self.square * n**2 + self.block * block, n**2 + self.gathered * block)
        return max(1, min(_MOST_ROWS, workspace // (4 * one)))


# Counted over all methods and widths; tests/test_memory.py counts again.
UPDATE = Cost(square=5, gathered=1)
ROBUST_UPDATE = Cost(square=7, gathered=1)
REFRESH = Cost(square=5)
CONVERGED_ROOT = Cost(square=4, cropped=True)  # by kernels
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
        """The stack of that side."""
        return self.group.right if self.right else self.group.left

    def row(self, row: int) -> Part:
        """Return one of the rows."""
        return replace(self, rows=slice(row, row + 1))

    def damped_by(self, factor: float) -> Part:
        """Return the rows with a larger damping."""
        damping = max(self.config.damping, LEAST_RIDGE) * factor
        return replace(self, config=replace(self.config, damping=damping))


class Portion(NamedTuple):
    """A batch of an update or a refresh.

    Attributes:
        parts: Rows of one format, with their options.
        batch: Their state.
        owners: The member of each row, on the device.
    """

    parts: Sequence[Part]
    batch: Batch
    owners: Tensor

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Portion:
        """Make a portion of parts."""
        batch = Batch([(part.factors, part.rows) for part in parts])
        owners = [part.group.owner[part.rows] for part in parts]
        return cls(parts, batch, owners[0] if len(owners) == 1 else torch.cat(owners))


def due_parts(groups: Sequence[Group], due: Mapping[int, Due]) -> Iterator[Part]:
    """Yield both sides of all rows that are due."""
    for group in groups if due else ():
        for right in (False, True):
            for run, config in group.runs(due, right):
                yield Part(group, right, run, config)


def rows_of(parts: Iterable[Part]) -> Iterator[tuple[Part, int]]:
    """Yield (part, row) for all rows of parts."""
    return ((part, row) for part in parts for row in range(part.rows.start, part.rows.stop))


def order_of(parts: Sequence[Part]) -> int:
    """Return the order of a batch: the largest of its parts."""
    return max(part.factors.order for part in parts)


def refresh_cost(part: Part) -> Cost:
    """Return the cost of a row at a refresh."""
    method = part.factors.format.method
    if method == "cholesky":
        return CONVERGED_ROOT if backend(part.factors.device).by_kernels else REFRESH
    return REFRESH if method == "eigen" and part.config.root == "eigen" else NEWTON


def batches(
    parts: Iterable[Part],
    workspace: int,
    cost: Cost | Callable[[Part], Cost],
    mixed: Callable[[Part], bool] = lambda part: False,
) -> Iterator[list[Part]]:
    """Yield batches of rows of equal format and options, each as large as the workspace allows.

    Batches are few and large: where matrices are small, launches take most of the time.

    Args:
        parts: The rows.
        workspace: In bytes.
        cost: Cost of a row.
        mixed: True if orders may share the batch of a part.
    """
    by_options: dict[tuple[Format, Config], dict[int, list[Part]]] = {}
    by_identity: dict[tuple[int, int], dict[int, list[Part]]] = {}  # hashing options is slow
    for part in parts:
        format, config = part.factors.format, part.config
        if (id(format), id(config)) not in by_identity:
            by_identity[id(format), id(config)] = by_options.setdefault((format, config), {})
        by_identity[id(format), id(config)].setdefault(part.factors.order, []).append(part)
    for (format, _), orders in by_options.items():
        example = next(iter(orders.values()))[0]
        needs = cost if isinstance(cost, Cost) else cost(example)
        # At 32 bits, rows that are not neighbours are copied; so are offloaded rows.
        copies = (format.statistic.bits == 32) + example.factors.offloaded
        needs = replace(needs, square=needs.square + copies)
        if needs.cropped and mixed(example):
            yield from _packed(orders, workspace, needs)
            continue
        for alike in _shared(orders, workspace, needs) if mixed(example) else orders.values():
            alike.sort(key=lambda part: (part.factors.order, part.factors.first + part.rows.start))
            size, total = _room_for(alike, workspace, needs), _count(alike)
            # Equal sizes: no batch has only a few rows, which cannot fill the device.
            equal = -(-total // -(-total // size))
            yield from _cut(alike, dict.fromkeys(orders, equal).__getitem__)


def _room_for(parts: Sequence[Part], workspace: int, needs: Cost) -> int:
    """Return the rows of a batch of these parts."""
    largest = max((part.group.shape for part in parts), key=math.prod)
    return needs.rows(order_of(parts), largest, workspace)


def _count(parts: Sequence[Part]) -> int:
    return sum(part.rows.stop - part.rows.start for part in parts)


def _shared(orders: Mapping[int, list[Part]], workspace: int, needs: Cost) -> Iterator[list[Part]]:
    """Yield orders that share batches: small ones of few rows join a larger one.

    They are padded to it, and take longer to compute. A batch less is worth that, as long as the
    padding is only a part of a batch. Results are the same to the bit as those of a batch alone.
    """
    together: list[Part] = []
    largest, spared = 0, 0.0
    for order in sorted(orders, reverse=True):
        parts = orders[order]
        rows = _count(parts)
        alike = bool(together) and thousands(order) == thousands(largest)
        extra = rows * (1 - (order / largest) ** 3) if alike else math.inf
        if extra <= spared and rows <= _room_for(parts, workspace, needs):
            together += parts
            spared -= extra
            continue
        if together:
            yield together
        together, largest = list(parts), order
        spared = _PADDED * _room_for(parts, workspace, needs)
    yield together


def _packed(orders: Mapping[int, list[Part]], workspace: int, needs: Cost) -> Iterator[list[Part]]:
    """Yield as few batches as possible, about equal, each filled with the next smaller orders."""
    falling = sorted(orders, reverse=True)
    for _, alike in groupby(falling, key=thousands):
        chosen = {order: orders[order] for order in alike}
        counts = tuple((order, _count(parts)) for order, parts in chosen.items())
        sizes = _packed_sizes(counts, workspace, needs)
        for parts in chosen.values():
            parts.sort(key=lambda part: part.factors.first + part.rows.start)
        yield from _cut(list(chain(*chosen.values())), sizes.__getitem__)


@lru_cache(maxsize=1024)
def _packed_sizes(
    counts: tuple[tuple[int, int], ...], workspace: int, needs: Cost
) -> Mapping[int, int]:
    """Return order of the first row -> number of rows of a batch.

    Args:
        counts: Orders, descending, and their numbers of rows.
        workspace: In bytes.
        needs: Cost of a row.
    """
    rooms = {order: needs.rows(order, (0, 0), workspace) for order, _ in counts}
    sizes = rooms
    for sixteenths in range(15, 0, -1):
        smaller = {order: -(-sixteenths * room // 16) for order, room in rooms.items()}
        if _number(counts, smaller) > _number(counts, rooms):
            break
        sizes = smaller
    return sizes


def _number(counts: Iterable[tuple[int, int]], rooms: Mapping[int, int]) -> int:
    """Return the number of batches, each as large as the room for the order of its first row."""
    number, left = 0, 0
    for order, rows in counts:
        more = -(-max(0, rows - left) // rooms[order])
        number += more
        left += more * rooms[order] - rows
    return number


def _cut(parts: Sequence[Part], room_of: Callable[[int], int]) -> Iterator[list[Part]]:
    """Cut parts into lists that do not exceed a number of rows; divide parts where needed.

    Args:
        parts: The rows.
        room_of: Order of the first row of a list -> the most rows of that list.
    """
    batch: list[Part] = []
    room = 0
    for part in parts:
        start = part.rows.start
        while start < part.rows.stop:
            if room == 0:
                if batch:
                    yield batch
                batch, room = [], room_of(part.factors.order)
            stop = min(part.rows.stop, start + room)
            rows = slice(start, stop)
            batch.append(part if rows == part.rows else replace(part, rows=rows))
            room -= stop - start
            start = stop
    if batch:
        yield batch
