"""Update, refresh, precondition: the algorithm on groups of blocks, chunked by a workspace.

A preconditioner knows matrices and gradients. It does not know ranks, nor optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.gradients import GradientBlocks
from kronbit.groups import Group, Member, chunks, make_groups
from kronbit.rules import Rule, graft_scale


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


@dataclass(frozen=True)
class Wave:
    """Parameters that are grafted together.

    Grafting needs the norm of Ĝ over all blocks of a parameter before anything is written, so Ĝ
    of a wave is held until then. A parameter too large for that is a wave of its own, and its Ĝ
    is computed twice: for the norm, then to be written.

    Attributes:
        parts: (group, rows) of each chunk.
        mask: bool (members,): the wave's members, on the device.
        fits: Whether Ĝ of the wave is held.
    """

    parts: tuple[tuple[Group, slice], ...]
    mask: Tensor
    fits: bool


class Preconditioner:
    """Second-order state of the parameters on one device.

    Args:
        members: The parameters, in order.
        rule: (L̂, G, R̂) -> Ĝ.
        p: The roots are L^(-1/p) and R^(-1/p).
        start: Start value of the statistics; ``None``: ε of each member.
        workspace: Bound of transient memory in bytes.
        device: Where the parameters live.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rule: Rule,
        p: int,
        start: float | None,
        workspace: int,
        device: torch.device,
    ) -> None:
        self.members, self.rule, self.workspace = tuple(members), rule, workspace
        self.groups = make_groups(members, p, start, device)
        self.graft_ratio = torch.ones(len(members), dtype=torch.float32, device=device)
        self.ungrafted = torch.zeros((), dtype=torch.int64, device=device)
        self._last_waves: tuple[tuple[int, ...], list[Wave]] = ((), [])

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
        for group in self.groups:
            for run, config in group.runs(due):
                for rows in chunks(run, UPDATE.rows(group, self.workspace)):
                    trusted = finite[group.owner[rows]]
                    G = blocks.gather(group, rows)
                    # where, not a product: 0 times NaN is NaN
                    G = torch.where(_per_row(trusted), G, 0.0)
                    group.left.update(rows, G @ G.mT, trusted, config)
                    group.right.update(rows, G.mT @ G, trusted, config)

    def refresh(self, due: Mapping[int, Config]) -> None:
        """PIRU for L̂ and R̂ of the members that are due."""
        for group in self.groups:
            for run, config in group.runs(due):
                for rows in chunks(run, REFRESH.rows(group, self.workspace)):
                    group.left.refresh(rows, config)
                    group.right.refresh(rows, config)

    def precondition(
        self,
        grads: Sequence[Tensor | None],
        norms: Tensor,
        finite: Tensor,
        active: tuple[int, ...],
        zero_nonfinite: bool,
    ) -> None:
        """Write G̃ = Ĝ ‖G‖ / ‖Ĝ‖ into the gradients, grafted per parameter.

        Args:
            grads: The members' gradients.
            norms: (members,): ‖G‖_F of each.
            finite: bool (members,): whose gradient is finite.
            active: Members to precondition.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.
        """
        blocks = GradientBlocks(self.members, grads)
        most = max((len(member.blocking) for member in self.members), default=0)
        squares = norms.new_zeros(len(self.members), most)
        for wave in self._waves(active):
            held = []
            for group, rows in wave.parts:
                Ghat = self._product(blocks, group, rows)
                square = torch.linalg.vector_norm(Ghat, dim=(-2, -1)).square()
                # One place per block, summed in a fixed order: the same bits every time.
                squares[group.owner[rows], group.number[rows]] = square
                held.append(Ghat if wave.fits else None)
            Ghat_norms = squares.sum(1).sqrt()
            scale = graft_scale(norms, Ghat_norms)
            # Where Ĝ overflowed although G is finite, F gets G itself.
            usable = finite & torch.isfinite(Ghat_norms) & torch.isfinite(scale)
            self.ungrafted += (wave.mask & finite & ~usable).sum()
            self.graft_ratio = torch.where(wave.mask, scale, self.graft_ratio)
            for (group, rows), kept in zip(wave.parts, held, strict=True):
                owner = group.owner[rows]
                Ghat = self._product(blocks, group, rows) if kept is None else kept
                G = blocks.gather(group, rows)
                if zero_nonfinite:
                    G = torch.where(_per_row(finite[owner]), G, 0.0)
                Gtilde = torch.where(_per_row(usable[owner]), Ghat * _per_row(scale[owner]), G)
                blocks.scatter(group, rows, Gtilde)
            blocks.flush()

    def refreshed(self) -> set[int]:
        """Members with a root that is not the identity. Waits for the device."""
        members: set[int] = set()
        for group in self.groups:
            for rows in chunks(
                slice(0, len(group.owner)), PRECONDITION.rows(group, self.workspace)
            ):
                same = group.left.is_identity(rows) & group.right.is_identity(rows)
                members.update(group.owner[rows][~same].tolist())
        return members

    def _product(self, blocks: GradientBlocks, group: Group, rows: slice) -> Tensor:
        """Ĝ of some rows: L̂ G R̂, or CASPR's sum."""
        return self.rule(
            group.left.roots(rows), blocks.gather(group, rows), group.right.roots(rows)
        )

    def _waves(self, active: tuple[int, ...]) -> list[Wave]:
        """Cut the active members into waves; remembered until others are active."""
        if self._last_waves[0] != active:
            self._last_waves = active, list(self._make_waves(active))
        return self._last_waves[1]

    def _make_waves(self, active: tuple[int, ...]) -> Iterator[Wave]:
        # Half of the workspace holds Ĝ, the other half is the scratch of a chunk.
        budget = self.workspace // 2
        wave: list[int] = []
        total = 0
        for index in active:
            size = 4 * math.prod(self.members[index].blocking.matrices)
            if wave and total + size > budget:
                yield self._make_wave(wave, budget, fits=total <= budget)
                wave, total = [], 0
            wave.append(index)
            total += size
        if wave:
            yield self._make_wave(wave, budget, fits=total <= budget)

    def _make_wave(self, wave: list[int], budget: int, fits: bool) -> Wave:
        wanted = dict.fromkeys(wave, self.members[wave[0]].config)
        parts = tuple(
            (group, rows)
            for group in self.groups
            for run, _ in group.runs(wanted)
            for rows in chunks(run, PRECONDITION.rows(group, budget))
        )
        mask = torch.zeros(len(self.members), dtype=torch.bool)
        mask[wave] = True
        return Wave(parts, mask.to(self.graft_ratio.device), fits)


def _per_row(values: Tensor) -> Tensor:
    """(rows,) -> (rows, 1, 1)."""
    return values[:, None, None]
