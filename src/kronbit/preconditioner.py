"""Update, refresh, precondition: the algorithm on groups of blocks, chunked by a workspace.

A preconditioner knows matrices and gradients. It does not know ranks, nor optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.gradients import GradientBlocks
from kronbit.groups import Group, Member, chunks, make_groups
from kronbit.rules import Algorithm, graft_scale


@dataclass(frozen=True)
class Cost:
    """Float32 matrices that one row of a chunk needs at the peak.

    Attributes:
        square: Of the larger order, n x n.
        block: Of the gradient's shape, m x n.
    """

    square: int
    block: int

    def rows(self, group: Group, workspace: int) -> int:
        """Rows of a chunk that stays within the workspace; a single row may exceed it."""
        m, n = group.shape
        return max(1, workspace // (4 * (self.square * max(m, n) ** 2 + self.block * m * n)))


# Counted over all methods and widths; tests/test_memory.py counts again.
UPDATE = Cost(square=10, block=1)
REFRESH = Cost(square=9, block=0)
PRECONDITION = Cost(square=4, block=4)

_REMEMBERED_WAVES = 16


@dataclass(frozen=True)
class Wave:
    """Parameters that are grafted together.

    Grafting needs the norm of Ĝ over all blocks of a parameter before anything is written, so G
    and Ĝ of a wave are held until then. A parameter too large for that is a wave of its own, and
    its Ĝ is computed twice: for the norm, then to be written.

    Attributes:
        parts: (group, rows) of each chunk.
        mask: The wave's members as bool (members,), on the device.
        fits: Whether G and Ĝ are held.
    """

    parts: tuple[tuple[Group, slice], ...]
    mask: Tensor
    fits: bool


class Preconditioner:
    """Second-order state of the parameters on one device, its members.

    Args:
        members: The parameters, in order.
        algorithm: Rule and root.
        workspace: Bound of transient memory in bytes.
        device: Where the parameters live.

    Attributes:
        refreshed: Members with a root that is not the identity. The others' G̃ is G, to the bit:
            ``precondition`` does not touch them.
        ungrafted: On the device, how often F got G itself because Ĝ had overflowed.
        graft_ratio: On the device, ‖G‖ / ‖Ĝ‖ of each member when it was last preconditioned.
    """

    def __init__(
        self,
        members: Sequence[Member],
        algorithm: Algorithm,
        workspace: int,
        device: torch.device,
    ) -> None:
        self.members, self.rule, self.workspace = tuple(members), algorithm.rule, workspace
        self.groups = make_groups(members, algorithm.p, device)
        self.refreshed: set[int] = set()
        self.ungrafted = torch.zeros((), dtype=torch.int64, device=device)
        self.graft_ratio = torch.ones(len(members), dtype=torch.float32, device=device)
        self._blocks = [len(member.blocking) for member in members]
        self._lengths = torch.tensor(self._blocks, dtype=torch.int64, device=device)
        self._waves: dict[tuple[int, ...], list[Wave]] = {}

    def update(
        self, grads: Sequence[Tensor | None], finite: Tensor, due: Mapping[int, Config]
    ) -> None:
        """PU for L with M = G Gᵀ and for R with M = Gᵀ G.

        Args:
            grads: The members' gradients.
            finite: bool (members,): whose gradient is finite. The others' statistics stay.
            due: Members to update, with their options.
        """
        blocks = GradientBlocks(self.members, grads)
        for group, rows, config in self._chunks(due, UPDATE):
            trusted = finite[group.owner[rows]]
            G = blocks.gather(group, rows)
            # where, not a product: 0 times NaN is NaN
            G = torch.where(_per_row(trusted), G, 0.0)
            group.left.update(rows, G @ G.mT, trusted, config)
            group.right.update(rows, G.mT @ G, trusted, config)

    def refresh(self, due: Mapping[int, Config]) -> None:
        """PIRU for L̂ and R̂ of the members that are due."""
        for group, rows, config in self._chunks(due, REFRESH):
            group.left.refresh(rows, config)
            group.right.refresh(rows, config)
        self.find_refreshed(due.keys() - self.refreshed)

    def find_refreshed(self, candidates: Collection[int]) -> None:
        """Note which candidates have left the identity. Waits for the device."""
        wanted = {index: self.members[index].config for index in candidates}
        for group, rows, _ in self._chunks(wanted, PRECONDITION):
            same = group.left.is_identity(rows) & group.right.is_identity(rows)
            self.refreshed.update(group.owner[rows][~same].tolist())

    def precondition(
        self,
        grads: Sequence[Tensor | None],
        norms: Tensor,
        finite: Tensor,
        zero_nonfinite: bool,
    ) -> None:
        """Write G̃ = Ĝ ‖G‖ / ‖Ĝ‖ over the gradients of refreshed members, grafted per parameter.

        Args:
            grads: The members' gradients.
            norms: (members,): ‖G‖_F of each.
            finite: bool (members,): whose gradient is finite.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.
        """
        active = tuple(i for i, g in enumerate(grads) if g is not None and i in self.refreshed)
        if not active:
            return
        blocks = GradientBlocks(self.members, grads)
        # ‖Ĝ‖² of every block, in the members' order, and then in the order of their blocks: summed
        # in this order whatever the chunks are, for the same bits every time.
        squares = norms.new_zeros(sum(self._blocks))
        for wave in self._waves_of(active):
            held = []
            for group, rows in wave.parts:
                G, Ghat = self._product(blocks, group, rows)
                squares[group.number[rows]] = torch.linalg.vector_norm(Ghat, dim=(-2, -1)).square()
                held.append((G, Ghat) if wave.fits else None)
            Ghat_norms = torch.segment_reduce(
                squares, "sum", lengths=self._lengths, unsafe=True
            ).sqrt()
            scale = graft_scale(norms, Ghat_norms)
            # Where Ĝ overflowed although G is finite, F gets G itself.
            usable = finite & torch.isfinite(Ghat_norms) & torch.isfinite(scale)
            self.ungrafted += (wave.mask & finite & ~usable).sum()
            self.graft_ratio = torch.where(wave.mask, scale, self.graft_ratio)
            for (group, rows), pair in zip(wave.parts, held, strict=True):
                owner = group.owner[rows]
                G, Ghat = self._product(blocks, group, rows) if pair is None else pair
                if zero_nonfinite:
                    G = torch.where(_per_row(finite[owner]), G, 0.0)
                Gtilde = torch.where(_per_row(usable[owner]), Ghat * _per_row(scale[owner]), G)
                blocks.scatter(group, rows, Gtilde)
            blocks.flush()

    def _chunks(
        self, due: Mapping[int, Config], cost: Cost
    ) -> Iterator[tuple[Group, slice, Config]]:
        """The rows of the members that are due, in chunks that fit into the workspace."""
        for group in self.groups if due else ():
            for run, config in group.runs(due):
                for rows in chunks(run, cost.rows(group, self.workspace)):
                    yield group, rows, config

    def _product(self, blocks: GradientBlocks, group: Group, rows: slice) -> tuple[Tensor, Tensor]:
        """G and Ĝ of some rows."""
        G = blocks.gather(group, rows)
        return G, self.rule(group.left.roots(rows), G, group.right.roots(rows))

    def _waves_of(self, active: tuple[int, ...]) -> list[Wave]:
        """Cut the active members into waves. Recent cuts are remembered."""
        if active not in self._waves:
            if len(self._waves) == _REMEMBERED_WAVES:
                self._waves.pop(next(iter(self._waves)))
            self._waves[active] = list(self._cut_into_waves(active))
        return self._waves[active]

    def _cut_into_waves(self, active: tuple[int, ...]) -> Iterator[Wave]:
        # Half of the workspace holds G and Ĝ, the other half is the scratch of a chunk.
        budget = self.workspace // 2
        wave: list[int] = []
        total = 0
        for index in active:
            size = 8 * math.prod(self.members[index].blocking.matrices)
            if wave and total + size > budget:
                yield self._make_wave(wave, budget, fits=total <= budget)
                wave, total = [], 0
            wave.append(index)
            total += size
        yield self._make_wave(wave, budget, fits=total <= budget)

    def _make_wave(self, wave: list[int], budget: int, fits: bool) -> Wave:
        wanted = dict.fromkeys(wave, self.members[wave[0]].config)
        parts = tuple(
            (group, rows)
            for group in self.groups
            for run, _ in group.runs(wanted)
            for rows in chunks(run, PRECONDITION.rows(group, budget))
        )
        mask = torch.zeros_like(self.graft_ratio, dtype=torch.bool)
        for index in wave:
            mask[index : index + 1].fill_(True)  # an index tensor would come from the host
        return Wave(parts, mask, fits)


def _per_row(values: Tensor) -> Tensor:
    """(rows,) -> (rows, 1, 1)."""
    return values[:, None, None]
