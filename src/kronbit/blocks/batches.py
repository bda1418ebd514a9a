"""Rows from all groups, cut into batches that the workspace can take."""

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

_MOST_ROWS = 65535  # of a batch: what a grid of programs can hold
_ENLARGED = 1 / 3  # of a batch: what may be computed in vain
_PAD = 64  # kernels fill up the sides of matrices to multiples of it


@dataclass(frozen=True)
class Cost:
    """Float32 matrices that one row of a batch needs at the peak.

    Attributes:
        square: Of the order, n x n (of the larger one, where both sides are at work).
        block: Of the gradient's shape, m x n.
        gathered: Of that shape, too, but before all that, beside a single square one.
        cropped: Whether nothing is computed of what matrices are enlarged by.
    """

    square: int
    block: int = 0
    gathered: int = 0
    cropped: bool = False

    def rows(self, order: int, shape: tuple[int, int], workspace: int) -> int:
        """Rows of a batch that stays within the workspace; a single row may exceed it."""
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
        """That side's stack."""
        return self.group.right if self.right else self.group.left

    def row(self, row: int) -> Part:
        """One of the rows."""
        return replace(self, rows=slice(row, row + 1))

    def damped_by(self, factor: float) -> Part:
        """The rows with a larger damping."""
        damping = max(self.config.damping, LEAST_RIDGE) * factor
        return replace(self, config=replace(self.config, damping=damping))


class Portion(NamedTuple):
    """What an update or a refresh does at once.

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
        """Look up the rows."""
        batch = Batch([(part.factors, part.rows) for part in parts])
        owners = [part.group.owner[part.rows] for part in parts]
        return cls(parts, batch, owners[0] if len(owners) == 1 else torch.cat(owners))


def due_parts(groups: Sequence[Group], due: Mapping[int, Due]) -> Iterator[Part]:
    """The sides of all rows that are due."""
    for group in groups if due else ():
        for right in (False, True):
            for run, config in group.runs(due, right):
                yield Part(group, right, run, config)


def rows_of(parts: Iterable[Part]) -> Iterator[tuple[Part, int]]:
    """The rows of parts, one by one."""
    return ((part, row) for part in parts for row in range(part.rows.start, part.rows.stop))


def order_of(parts: Sequence[Part]) -> int:
    """The order of a batch: the largest of its parts'."""
    return max(part.factors.order for part in parts)


def refresh_cost(part: Part) -> Cost:
    """What a row needs for its root."""
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
    """Batches of rows of equal format and options, each as large as the workspace allows.

    Few large batches: the time of an update is that of its launches, where matrices are small.

    Args:
        parts: The rows.
        workspace: In bytes.
        cost: What a row needs.
        mixed: Whether orders may share a batch, by one of its parts.
    """
    found: dict[tuple[Format, Config], dict[int, list[Part]]] = {}
    known: dict[tuple[int, int], dict[int, list[Part]]] = {}  # to hash options takes long
    for part in parts:
        format, config = part.factors.format, part.config
        if (id(format), id(config)) not in known:
            known[id(format), id(config)] = found.setdefault((format, config), {})
        known[id(format), id(config)].setdefault(part.factors.order, []).append(part)
    for (format, _), orders in found.items():
        one = next(iter(orders.values()))[0]
        needs = cost if isinstance(cost, Cost) else cost(one)
        # Of 32 bits, rows that are not neighbours are copied as they are; and so is what has been
        # offloaded.
        copies = (format.statistic.bits == 32) + one.factors.offloaded
        needs = replace(needs, square=needs.square + copies)
        if needs.cropped and mixed(one):
            yield from _packed(orders, workspace, needs)
            continue
        for own in _shared(orders, workspace, needs) if mixed(one) else orders.values():
            own.sort(key=lambda part: (part.factors.order, part.factors.first + part.rows.start))
            size, total = _room_for(own, workspace, needs), _count(own)
            # Equal ones: no batch is left with a few rows that cannot fill the device.
            equal = -(-total // -(-total // size))
            yield from _cut(own, dict.fromkeys(orders, equal).__getitem__)


def _room_for(parts: Sequence[Part], workspace: int, needs: Cost) -> int:
    """Rows of a batch of such parts."""
    largest = max((part.group.shape for part in parts), key=math.prod)
    return needs.rows(order_of(parts), largest, workspace)


def _count(parts: Sequence[Part]) -> int:
    return sum(part.rows.stop - part.rows.start for part in parts)


def _shared(orders: Mapping[int, list[Part]], workspace: int, needs: Cost) -> Iterator[list[Part]]:
    """Orders that share batches: small ones, of few rows, go along with a larger one.

    They are enlarged to it, so that it takes longer to compute them. That is worth a batch less as
    long as it is not more than a part of a batch. To the bit, results are those of a batch alone.
    """
    together: list[Part] = []
    largest, spared = 0, 0.0
    for order in sorted(orders, reverse=True):
        own = orders[order]
        rows = _count(own)
        alike = bool(together) and thousands(order) == thousands(largest)
        extra = rows * (1 - (order / largest) ** 3) if alike else math.inf
        if extra <= spared and rows <= _room_for(own, workspace, needs):
            together += own
            spared -= extra
            continue
        if together:
            yield together
        together, largest = list(own), order
        spared = _ENLARGED * _room_for(own, workspace, needs)
    yield together


def _packed(orders: Mapping[int, list[Part]], workspace: int, needs: Cost) -> Iterator[list[Part]]:
    """As few batches as can be, each filled up with the next smaller orders, and about equal."""
    falling = sorted(orders, reverse=True)
    for _, alike in groupby(falling, key=thousands):
        own = {order: orders[order] for order in alike}
        counts = tuple((order, _count(parts)) for order, parts in own.items())
        sizes = _packed_sizes(counts, workspace, needs)
        for parts in own.values():
            parts.sort(key=lambda part: part.factors.first + part.rows.start)
        yield from _cut(list(chain(*own.values())), sizes.__getitem__)


@lru_cache(maxsize=1024)
def _packed_sizes(
    counts: tuple[tuple[int, int], ...], workspace: int, needs: Cost
) -> Mapping[int, int]:
    """By the order of its first row: how many rows a batch takes.

    Args:
        counts: Orders, falling, and how many rows of each there are.
        workspace: In bytes.
        needs: What a row needs.
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
    """How many batches there are, each as large as there is room for its first row's order."""
    number, left = 0, 0
    for order, rows in counts:
        more = -(-max(0, rows - left) // rooms[order])
        number += more
        left += more * rooms[order] - rows
    return number


def _cut(parts: Sequence[Part], room_of: Callable[[int], int]) -> Iterator[list[Part]]:
    """Cut parts, and divide them where needed, into lists of few enough rows.

    Args:
        parts: The rows.
        room_of: Order of the first row of a list -> how many it may have.
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
            here = slice(start, stop)
            batch.append(part if here == part.rows else replace(part, rows=here))
            room -= stop - start
            start = stop
    if batch:
        yield batch
