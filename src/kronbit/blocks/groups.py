"""Groups of blocks of one shape: row i of every stack belongs to one block.

The blocks of a group also share formats and start value, so one tensor can hold their state.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.blocking import Block, Blocking, Grid
from kronbit.config import Config, Format
from kronbit.factors import Factors
from kronbit.rules import Rule

# Shape, format of the left side, format of the right side, start value of a group.
_Key: TypeAlias = tuple[tuple[int, int], Format, Format, float]

# The point in an interval at which a statistic and its root are due, under ``stagger``: the block's
# phase, which is a position in the interval, in [0, 1); and True for R, whose turn follows L's.
Turn: TypeAlias = tuple[float, bool]

_TURN_SIZE = 2**23  # largest number of elements in the larger factors of one turn
_SIMILAR, _FEW = 2 / 3, 1 / 8  # fractions of a turn's largest order, and of _TURN_SIZE


@dataclass(frozen=True)
class Member:
    """A parameter as the preconditioner sees it.

    Attributes:
        blocking: The division into blocks.
        config: The options when the state was made. They determine formats and start value; all
            other options are those of the step.
    """

    blocking: Blocking
    config: Config


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a group: blocks of one grid of one member that have one phase.

    Attributes:
        member: The member.
        grid: The grid of the blocks.
        first: Index of the first block within the grid.
        start: The first row.
        stop: One past the last row.
        phase: Position of the blocks in the interval, in [0, 1), under ``stagger``.
    """

    member: int
    grid: Grid
    first: int
    start: int
    stop: int
    phase: float

    def blocks(self) -> Iterator[Block]:
        """Yield the block of each row."""
        return islice(self.grid.blocks(), self.first, self.first + self.stop - self.start)


@dataclass(frozen=True)
class Due:
    """The blocks of a member that are updated or refreshed at a step.

    Attributes:
        config: The member's options at this step.
        turns: The turns that are due; ``None`` for both sides of all blocks.
    """

    config: Config
    turns: frozenset[Turn] | None = None


# The index of a member -> what is due of it.
DueMembers: TypeAlias = Mapping[int, Due]


@dataclass
class Group:
    """Blocks of one shape (m, n) and one format.

    Attributes:
        shape: (m, n).
        left: L and L̂, order m.
        right: R and R̂, order n.
        spans: The rows of each grid of each member, in row order.
        member_of: The member of each row, on the device.
        number: The index of each row's block among all blocks of the device, counted member by
            member, on the device.
        pieces: Cache of ``gradients.GradientBlocks``: (start, stop) -> views that hold these rows.
    """

    shape: tuple[int, int]
    left: Factors
    right: Factors
    spans: tuple[Span, ...]
    member_of: Tensor
    number: Tensor
    pieces: dict[tuple[int, int], tuple[Any, ...]] = field(init=False, default_factory=dict)

    def runs(self, wanted: DueMembers, right: bool) -> Iterator[tuple[slice, Config]]:
        """Yield maximal ranges of rows of one side that are due with equal options."""
        start, current = 0, None
        for span in self.spans:
            due = wanted.get(span.member)
            is_due = due is not None and (due.turns is None or (span.phase, right) in due.turns)
            config = due.config if due is not None and is_due else None
            if config == current:
                continue
            if current is not None:
                yield slice(start, span.start), current
            start, current = span.start, config
        if current is not None:
            yield slice(start, self.spans[-1].stop), current

    def locate(self, members: Sequence[Member]) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield the location of each row's block in its gradient.

        A location is the row, its member, the index of the block within the member, the offset of
        the block in the gradient, the stride between the block's rows, and the member's taps.
        """
        for span in self.spans:
            blocking = members[span.member].blocking
            _, M, N = blocking.matrices
            for row, block in enumerate(span.blocks(), span.start):
                first = (block.matrix * M + block.row) * N + block.column
                yield row, span.member, block.index, first, N, blocking.taps


def chunks(rows: slice, size: int) -> Iterator[slice]:
    """Yield ranges of at most ``size`` rows that cover a range."""
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def make_groups(members: Sequence[Member], device: torch.device) -> list[Group]:
    """Group the blocks of all members, in order, and allocate their factors."""
    grids: dict[_Key, list[tuple[int, Grid]]] = {}
    for index, member in enumerate(members):
        for grid in member.blocking.grids:
            left, right = map(member.config.format, grid.shape)
            key: _Key = (grid.shape, left, right, member.config.start_value)
            grids.setdefault(key, []).append((index, grid))
    rows = {key: sum(len(grid) for _, grid in of_group) for key, of_group in grids.items()}
    offload = any(member.config.offload_statistics for member in members)
    sides, phases = _allocate(rows, device, offload), _phases(rows)
    first_number = list(accumulate((len(member.blocking) for member in members), initial=0))
    groups = []
    for key, of_group in grids.items():
        spans = tuple(_spans(of_group, phases[key]))
        blocks = [(span.member, block.index) for span in spans for block in span.blocks()]
        member_of = torch.tensor([member for member, _ in blocks], device=device)
        number = torch.tensor([first_number[i] + j for i, j in blocks], device=device)
        L, R = sides[key]
        groups.append(Group(key[0], L, R, spans, member_of, number))
    return groups


def _allocate(
    rows: Mapping[_Key, int], device: torch.device, offload: bool
) -> dict[_Key, list[Factors]]:
    """Allocate both sides' factors of each group.

    Factors of one order, format and start value are windows of one stack.
    """
    totals: Counter[tuple[int, Format, float]] = Counter()
    windows = []
    for key, count in rows.items():
        (m, n), left, right, start = key
        for stack in ((m, left, start), (n, right, start)):
            windows.append((key, stack, totals[stack]))
            totals[stack] += count
    stacks = {
        (order, format, start): Factors(order, total, format, start, device, offload)
        for (order, format, start), total in totals.items()
    }
    sides: dict[_Key, list[Factors]] = defaultdict(list)
    for key, stack, first in windows:
        sides[key].append(stacks[stack].window(first, rows[key]))
    return sides


def _phases(rows: Mapping[_Key, int]) -> dict[_Key, list[float]]:
    """Assign each group's rows to slots of the interval; return the phases of the rows.

    The rows of one slot suffice to keep a GPU busy. Large blocks come first, so that the blocks of
    a slot have similar orders and can share batches; a nearly empty slot takes any order.
    """
    slots: dict[_Key, list[int]] = {}
    slot = filled = largest = 0
    for key in sorted(rows, key=lambda key: max(key[0]), reverse=True):
        order = max(key[0])
        slots[key] = []
        for _ in range(rows[key]):
            much_smaller = order < largest * _SIMILAR and filled >= _TURN_SIZE * _FEW
            if filled and (much_smaller or filled + order**2 > _TURN_SIZE):
                slot, filled = slot + 1, 0
            largest = largest if filled else order
            slots[key].append(slot)
            filled += order**2
    return {key: [number / (slot + 1) for number in of_group] for key, of_group in slots.items()}


def _spans(grids: Sequence[tuple[int, Grid]], phases: Sequence[float]) -> Iterator[Span]:
    """Cut the rows of a group where the grid or the phase changes."""
    row = 0
    for member, grid in grids:
        first = row
        for phase, same in groupby(phases[first : first + len(grid)]):
            stop = row + len(list(same))
            yield Span(member, grid, row - first, row, stop, phase)
            row = stop


class DeviceStacks:
    """All stacks of one device: the part of a preconditioner that kernels and ranks work on.

    Args:
        members: The parameters, in order.
        rule: (L̂, G, R̂) -> Ĝ.
        workspace: Limit on transient memory, in bytes.
        device: The device.

    Attributes:
        groups: The members' blocks.
        graft_ratio: ‖G‖ / ‖Ĝ‖ of each member when it was last preconditioned, on the device.
        ungrafted: Number of times that F received G because Ĝ had overflowed, on the device.
        refreshed: Members with a root that is not the identity.
        outer_product_tables: Tables of the kernels for M; created at the first update.
    """

    def __init__(
        self, members: Sequence[Member], rule: Rule, workspace: int, device: torch.device
    ) -> None:
        self.members, self.groups = tuple(members), tuple(make_groups(members, device))
        self.rule, self.workspace, self.device = rule, workspace, device
        self.graft_ratio = torch.ones(len(members), dtype=torch.float32, device=device)
        self.ungrafted = torch.zeros((), dtype=torch.int64, device=device)
        self.refreshed: set[int] = set()
        self.outer_product_tables: Any = None

    def held_bytes(self, member: int) -> int:
        """Return the bytes of G and Ĝ of a member in float32."""
        return 8 * math.prod(self.members[member].blocking.matrices)
