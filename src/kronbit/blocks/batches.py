"""Batches of rows from all groups, sized to the workspace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.groups import DueMembers, Group
from kronbit.config import Config, Format
from kronbit.factors import Batch, Factors
from kronbit.linalg.backend import backend
from kronbit.linalg.orthogonal import rounded_order
from kronbit.linalg.roots import LEAST_RIDGE

_MOST_ROWS = 65535  # of a batch: the limit of a launch grid
_PADDING = 1 / 3  # fraction of a batch that may be padding
_TILE = 64  # kernels pad the sides of matrices to multiples of this


@dataclass(frozen=True)
class Cost:
    """Peak number of float32 matrices per row of a batch.

    Attributes:
        square: Matrices n x n, where n is the order; the larger order if both sides are in use.
        block: Matrices m x n, the shape of the block.
        gathered: Matrices m x n while G is gathered, in addition to one square matrix.
        cropped: True if kernels skip the padding of matrices.
    """

    square: int
    block: int = 0
    gathered: int = 0
    cropped: bool = False

    def rows(self, order: int, shape: tuple[int, int], workspace: int) -> int:
        """Return the number of rows that fit into the workspace, at least one."""
        n, *sides = (-(-side // _TILE) * _TILE for side in (order, *shape))
        block = math.prod(sides)
        elements = max(self.square * n**2 + self.block * block, n**2 + self.gathered * block)
        return max(1, min(_MOST_ROWS, workspace // (4 * elements)))


# Maxima over all methods and bit widths. tests/reporting/test_memory.py measures them.
UPDATE = Cost(square=5, gathered=1)
ROBUST_UPDATE = Cost(square=7, gathered=1)
REFRESH = Cost(square=5)
CONVERGED_ROOT = Cost(square=4, cropped=True)  # with kernels
NEWTON = Cost(square=10)
PRECONDITION = Cost(square=4, block=4)


@dataclass(frozen=True)
class Part:
    """A range of rows on one side of a group, with the options of the step."""

    group: Group
    right: bool
    rows: slice
    config: Config

    @property
    def factors(self) -> Factors:
        """The factors of this side."""
        return self.group.right if self.right else self.group.left

    def row(self, row: int) -> Part:
        """Return a part with this row only."""
        return replace(self, rows=slice(row, row + 1))

    def damped_by(self, factor: float) -> Part:
        """Return the part with its damping multiplied by a factor."""
        damping = max(self.config.damping, LEAST_RIDGE) * factor
        return replace(self, config=replace(self.config, damping=damping))


# Rows of equal format and options that are updated or refreshed together, their factors, and the
# member of each row, on the device.
Portion: TypeAlias = tuple[Sequence[Part], Batch, Tensor]


def portion_of(parts: Sequence[Part]) -> Portion:
    """Return the given rows with their factors and members."""
    batch = Batch([(part.factors, part.rows) for part in parts])
    members = [part.group.member_of[part.rows] for part in parts]
    return parts, batch, members[0] if len(members) == 1 else torch.cat(members)


def due_parts(groups: Sequence[Group], due: DueMembers) -> Iterator[Part]:
    """Yield the rows that are due, on both sides."""
    for group in groups if due else ():
        for right in (False, True):
            for run, config in group.runs(due, right):
                yield Part(group, right, run, config)


def rows_of(parts: Iterable[Part]) -> Iterator[tuple[Part, int]]:
    """Yield every row with its part."""
    return ((part, row) for part in parts for row in range(part.rows.start, part.rows.stop))


def order_of(parts: Sequence[Part]) -> int:
    """Return the order of a batch, which is the largest order of its parts."""
    return max(part.factors.order for part in parts)


def refresh_cost(part: Part) -> Cost:
    """Return the cost of a row's refresh."""
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
    """Yield batches of rows of equal format and options, as large as the workspace allows.

    Launch overhead dominates for small matrices, so parts for which ``mixed`` returns True share
    batches with other orders.
    """
    classes: dict[tuple[Format, Config], dict[int, list[Part]]] = {}
    by_id: dict[tuple[int, int], dict[int, list[Part]]] = {}  # hashing options is slow
    for part in parts:
        format, config = part.factors.format, part.config
        if (id(format), id(config)) not in by_id:
            by_id[id(format), id(config)] = classes.setdefault((format, config), {})
        by_id[id(format), id(config)].setdefault(part.factors.order, []).append(part)
    for (format, _), orders in classes.items():
        first = next(iter(orders.values()))[0]
        row_cost = cost if isinstance(cost, Cost) else cost(first)
        # At 32 bits, rows that are not adjacent are copied; offloaded statistics are, too.
        copies = (format.statistic.bits == 32) + first.factors.offloaded
        row_cost = replace(row_cost, square=row_cost.square + copies)
        if row_cost.cropped and mixed(first):
            yield from _pack(orders, workspace, row_cost)
            continue
        for rows in _join(orders, workspace, row_cost) if mixed(first) else orders.values():
            rows.sort(key=lambda part: (part.factors.order, part.factors.first + part.rows.start))
            size, total = _capacity(rows, workspace, row_cost), _count(rows)
            # Equal batches: a small last batch would not fill the device.
            equal = -(-total // -(-total // size))
            yield from _cut(rows, dict.fromkeys(orders, equal).__getitem__)


def _capacity(parts: Sequence[Part], workspace: int, cost: Cost) -> int:
    """Return the number of rows that a batch of these parts may have."""
    largest = max((part.group.shape for part in parts), key=math.prod)
    return cost.rows(order_of(parts), largest, workspace)


def _count(parts: Sequence[Part]) -> int:
    return sum(part.rows.stop - part.rows.start for part in parts)


def _join(orders: Mapping[int, list[Part]], workspace: int, cost: Cost) -> Iterator[list[Part]]:
    """Join small orders with few rows to a larger order, to which their matrices are padded.

    Padding may fill a fraction of a batch, since joining saves a batch.
    """
    joined: list[Part] = []
    largest, budget = 0, 0.0
    for order in sorted(orders, reverse=True):
        parts = orders[order]
        rows = _count(parts)
        joinable = bool(joined) and rounded_order(order) == rounded_order(largest)
        padding = rows * (1 - (order / largest) ** 3) if joinable else math.inf
        if padding <= budget and rows <= _capacity(parts, workspace, cost):
            joined += parts
            budget -= padding
            continue
        if joined:
            yield joined
        joined, largest = list(parts), order
        budget = _PADDING * _capacity(parts, workspace, cost)
    yield joined


def _pack(orders: Mapping[int, list[Part]], workspace: int, cost: Cost) -> Iterator[list[Part]]:
    """Yield the fewest batches, of about equal size; smaller orders fill up each batch."""
    descending = sorted(orders, reverse=True)
    for _, joinable in groupby(descending, key=rounded_order):
        selected = {order: orders[order] for order in joinable}
        counts = tuple((order, _count(parts)) for order, parts in selected.items())
        sizes = _packed_sizes(counts, workspace, cost)
        for parts in selected.values():
            parts.sort(key=lambda part: part.factors.first + part.rows.start)
        yield from _cut(list(chain(*selected.values())), sizes.__getitem__)


@lru_cache(maxsize=1024)
def _packed_sizes(
    counts: tuple[tuple[int, int], ...], workspace: int, cost: Cost
) -> Mapping[int, int]:
    """Return the number of rows of a batch by the order of its first row.

    ``counts`` are pairs of order and number of rows, in descending order.
    """
    capacities = {order: cost.rows(order, (0, 0), workspace) for order, _ in counts}
    sizes = capacities
    for sixteenths in range(15, 0, -1):
        smaller = {order: -(-sixteenths * size // 16) for order, size in capacities.items()}
        if _count_batches(counts, smaller) > _count_batches(counts, capacities):
            break
        sizes = smaller
    return sizes


def _count_batches(counts: Iterable[tuple[int, int]], sizes: Mapping[int, int]) -> int:
    """Count the batches if the order of the first row determines the size of a batch."""
    count, free = 0, 0
    for order, rows in counts:
        new = -(-max(0, rows - free) // sizes[order])
        count += new
        free += new * sizes[order] - rows
    return count


def _cut(parts: Sequence[Part], size_of: Callable[[int], int]) -> Iterator[list[Part]]:
    """Cut parts into batches, and divide parts where a batch ends.

    ``size_of`` maps the order of a batch's first row to the number of rows in the batch.
    """
    batch: list[Part] = []
    free = 0
    for part in parts:
        start = part.rows.start
        while start < part.rows.stop:
            if free == 0:
                if batch:
                    yield batch
                batch, free = [], size_of(part.factors.order)
            stop = min(part.rows.stop, start + free)
            rows = slice(start, stop)
            batch.append(part if rows == part.rows else replace(part, rows=rows))
            free -= stop - start
            start = stop
    if batch:
        yield batch
