"""Update, refresh, precondition: the algorithm on groups of blocks, chunked by a workspace.

A preconditioner knows matrices and gradients. It does not know ranks, nor optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors import Batch, Factors
from kronbit.gradients import GradientBlocks
from kronbit.groups import Due, Group, Member, chunks, make_groups
from kronbit.kernel_products import KernelProducts
from kronbit.linalg import QR, cholesky_qr, householder_qr
from kronbit.nonfinite import Measured
from kronbit.products import multiply, operand
from kronbit.rules import Algorithm, combine, graft_scale


@dataclass(frozen=True)
class Cost:
    """Float32 matrices that one row of a chunk needs at the peak.

    Attributes:
        square: Of the order, n x n (of the larger one, where both sides are at work).
        block: Of the gradient's shape, m x n.
    """

    square: int
    block: int

    def rows(self, order: int, shape: tuple[int, int], workspace: int) -> int:
        """Rows of a chunk that stays within the workspace; a single row may exceed it."""
        one = 4 * (self.square * order**2 + self.block * math.prod(shape))
        return max(1, min(_MOST_ROWS, workspace // one))


# Counted over all methods and widths; tests/test_memory.py counts again.
UPDATE = Cost(square=7, block=2)
REFRESH = Cost(square=7, block=0)
NEWTON = Cost(square=10, block=0)
PRECONDITION = Cost(square=4, block=4)

_REMEMBERED_WAVES = 16
_MOST_ROWS = 65535  # of a batch: what a grid of programs can hold


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


@dataclass(frozen=True)
class Part:
    """Rows of one side of a group."""

    group: Group
    factors: Factors
    rows: slice


def _cut(parts: Sequence[Part], size: int) -> Iterator[list[Part]]:
    """Cut parts, and divide them where needed, into lists of at most ``size`` rows."""
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


class Preconditioner:
    """Second-order state of the parameters on one device, its members.

    Args:
        members: The parameters, in order.
        algorithm: Rule and root.
        workspace: Bound of transient memory in bytes.
        graphs: Whether the ordinary step may be a CUDA graph.
        device: Where the parameters live.

    Attributes:
        refreshed: Members with a root that is not the identity. The others' G̃ is G, to the bit:
            ``precondition`` does not touch them.
        products: How the members' products are taken, by kernels where there are some.
        phases: Of each member's blocks, ascending: when they have their turn, if staggered.
        ungrafted: On the device, how often F got G itself because Ĝ had overflowed.
        graft_ratio: On the device, ‖G‖ / ‖Ĝ‖ of each member when it was last preconditioned.
    """

    def __init__(
        self,
        members: Sequence[Member],
        algorithm: Algorithm,
        workspace: int,
        graphs: bool,
        device: torch.device,
    ) -> None:
        self.members, self.rule, self.workspace = tuple(members), algorithm.rule, workspace
        self.groups = make_groups(members, algorithm.p, device)
        self.refreshed: set[int] = set()
        self.ungrafted = torch.zeros((), dtype=torch.int64, device=device)
        self.graft_ratio = torch.ones(len(members), dtype=torch.float32, device=device)
        self.products = KernelProducts(self, graphs)
        self._device = device
        self.phases = self._phases()
        self._blocks = [len(member.blocking) for member in members]
        self._lengths = torch.tensor(self._blocks, dtype=torch.int64, device=device)
        self._waves: dict[tuple[int, ...], list[Wave]] = {}

    def _phases(self) -> list[tuple[float, ...]]:
        found: list[set[float]] = [set() for _ in self.members]
        for group in self.groups:
            for segment in group.segments:
                found[segment.member].add(segment.phase)
        return [tuple(sorted(own)) for own in found]

    # ------------------------------------------------------------------------ statistics, roots

    def update(
        self, grads: Sequence[Tensor | None], finite: Tensor, due: Mapping[int, Due]
    ) -> None:
        """PU for L with M = G Gᵀ and for R with M = Gᵀ G.

        Args:
            grads: The members' gradients.
            finite: bool (members,): whose gradient is finite. The others' statistics stay.
            due: Members to update, with their options and blocks.
        """
        blocks = GradientBlocks(self.members, grads)
        checks = []
        for parts, config in self._batches(due, UPDATE):
            failed = self._update_parts(blocks, finite, parts, config)
            if parts[0].factors.method.takes_qr:
                checks.append((parts, config, failed))
        if checks:
            self._redo_failed(blocks, finite, checks)

    def _update_parts(
        self,
        blocks: GradientBlocks,
        finite: Tensor,
        parts: Sequence[Part],
        config: Config,
        qr: QR = cholesky_qr,
    ) -> Tensor:
        """PU of rows of one order; returns whose QR has failed."""
        n = parts[0].factors.order
        trusted = torch.cat([finite[part.group.owner[part.rows]] for part in parts])
        M = torch.empty(len(trusted), n, n, dtype=torch.float32, device=self._device)
        start = 0
        for part in parts:
            here = slice(start, start + part.rows.stop - part.rows.start)
            start = here.stop
            G = blocks.gather(part.group, part.rows)
            # where, not a product: 0 times NaN is NaN
            g = operand(torch.where(_per_row(trusted[here]), G, 0.0))
            left, right = (g, g.mT) if part.factors is part.group.left else (g.mT, g)
            multiply(left, right, symmetric=True, out=M[here])
        batch = Batch(tuple((part.factors, part.rows) for part in parts))
        return batch.update(M, trusted, config, qr)

    def _redo_failed(
        self,
        blocks: GradientBlocks,
        finite: Tensor,
        checks: Sequence[tuple[Sequence[Part], Config, Tensor]],
    ) -> None:
        """Update rows whose Cholesky-QR failed again, by Householder. Waits for the device once."""
        failed = iter(torch.cat([flags for _, _, flags in checks]).tolist())
        for parts, config, _ in checks:
            for part in parts:
                for row in range(part.rows.start, part.rows.stop):
                    if next(failed):
                        one = [replace(part, rows=slice(row, row + 1))]
                        self._update_parts(blocks, finite, one, config, householder_qr)
                        part.factors.counters["householder"] += 1

    def refresh(self, grads: Sequence[Tensor | None], due: Mapping[int, Due]) -> None:
        """PIRU for L̂ and R̂ of the blocks that are due.

        A member counts as refreshed once all its blocks are; staggered ones are so one by one.

        Args:
            grads: The members' gradients, on which products in bf16 are tried.
            due: Members to refresh, with their options and blocks.
        """
        for parts, config in self._batches(due, REFRESH, NEWTON):
            Batch(tuple((part.factors, part.rows) for part in parts)).refresh(config)
        staggered = {i for i, own in due.items() if own.phases is not None}
        known = set(self.refreshed)
        self.find_refreshed(due.keys() - staggered)
        self.find_refreshed(staggered, whole=True)
        # Staggered blocks are compared together, at the turn of the last.
        last = {i for i in staggered if self.phases[i][-1] in (due[i].phases or ())}
        new = self.refreshed - known
        self.products.choose(grads, [i for i in due if i not in staggered - last - new])

    def find_refreshed(self, candidates: Collection[int], whole: bool = False) -> None:
        """Note which candidates have left the identity. Waits for the device.

        Args:
            candidates: Members.
            whole: Whether all blocks of a member must have left it, or any.
        """
        wanted = {i: Due(self.members[i].config) for i in candidates if i not in self.refreshed}
        if not wanted:
            return
        changed = torch.zeros(sum(self._blocks), dtype=torch.bool, device=self._device)
        for parts, _ in self._batches(wanted, PRECONDITION):
            for part in parts:
                here = part.group.number[part.rows]
                changed[here] = changed[here] | ~part.factors.is_identity(part.rows)
        flags = iter(changed.tolist())
        for i, count in enumerate(self._blocks):
            own = list(islice(flags, count))
            if i in wanted and (all(own) if whole else any(own)):
                self.refreshed.add(i)

    def _batches(
        self, due: Mapping[int, Due], cost: Cost, newton: Cost | None = None
    ) -> Iterator[tuple[list[Part], Config]]:
        """Rows of equal order, format and options, from all groups, as many as the workspace takes.

        Few large batches: the time of an update is that of its launches, where matrices are small.

        Args:
            due: The members.
            cost: What a row needs.
            newton: What it needs where roots are taken by Schur-Newton.
        """
        found: dict[tuple[int, Format, Config], list[Part]] = {}
        for group in self.groups if due else ():
            for run, config in group.runs(due):
                for factors in (group.left, group.right):
                    key = (factors.order, factors.format, config)
                    found.setdefault(key, []).append(Part(group, factors, run))
        for (order, format, config), parts in found.items():
            largest = max((part.group.shape for part in parts), key=math.prod)
            by_newton = format.method != "eigen" or config.root == "schur_newton"
            own = newton if newton is not None and by_newton else cost
            size = own.rows(order, largest, self.workspace)
            for batch in _cut(parts, size):
                yield batch, config

    # -------------------------------------------------------------------------------- gradients

    def precondition(self, measured: Measured, zero_nonfinite: bool) -> None:
        """Write G̃ = Ĝ ‖G‖ / ‖Ĝ‖ over the gradients of refreshed members, grafted per parameter.

        Args:
            measured: The members' gradients; others may follow.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.
        """
        left = self.products.precondition(measured, zero_nonfinite)
        exact = tuple(i for i in left if measured.grads[i] is not None)
        if exact:
            own = slice(len(self.members))
            grads, norms, finite = measured.grads[own], measured.norms[own], measured.finite[own]
            self._precondition_exactly(exact, grads, norms, finite, zero_nonfinite)

    def _precondition_exactly(
        self,
        active: tuple[int, ...],
        grads: Sequence[Tensor | None],
        norms: Tensor,
        finite: Tensor,
        zero_nonfinite: bool,
    ) -> None:
        """``precondition`` in float32, group by group: the contract."""
        blocks = GradientBlocks(self.members, grads)
        # ‖Ĝ‖² of every block, in the members' order, and then in the order of their blocks: summed
        # in this order whatever the chunks are, for the same bits every time.
        squares = norms.new_zeros(sum(self._blocks))
        for wave in self._waves_of(active):
            held = []
            for group, rows in wave.parts:
                G, Ghat = self.product(blocks, group, rows)
                squares[group.number[rows]] = torch.linalg.vector_norm(Ghat, dim=(-2, -1)).square()
                held.append((G, Ghat) if wave.fits else None)
            Ghat_norms = torch.segment_reduce(
                squares, "sum", lengths=self._lengths, unsafe=True
            ).sqrt()
            scale = graft_scale(norms, Ghat_norms)
            # Where Ĝ overflowed although G is finite, F gets G itself.
            usable = finite & torch.isfinite(Ghat_norms) & torch.isfinite(scale)
            self.ungrafted += (wave.mask & finite & ~usable).sum()
            self.graft_ratio.copy_(torch.where(wave.mask, scale, self.graft_ratio))
            for (group, rows), pair in zip(wave.parts, held, strict=True):
                owner = group.owner[rows]
                G, Ghat = self.product(blocks, group, rows) if pair is None else pair
                if zero_nonfinite:
                    G = torch.where(_per_row(finite[owner]), G, 0.0)
                Gtilde = torch.where(_per_row(usable[owner]), Ghat * _per_row(scale[owner]), G)
                blocks.scatter(group, rows, Gtilde)
            blocks.flush()

    def product(self, blocks: GradientBlocks, group: Group, rows: slice) -> tuple[Tensor, Tensor]:
        """G and Ĝ of some rows."""
        G = blocks.gather(group, rows)
        return G, combine(self.rule, group.left.roots(rows), G, group.right.roots(rows))

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
        wanted = dict.fromkeys(wave, Due(self.members[wave[0]].config))
        parts = tuple(
            (group, rows)
            for group in self.groups
            for run, _ in group.runs(wanted)
            for rows in chunks(run, PRECONDITION.rows(max(group.shape), group.shape, budget))
        )
        mask = torch.zeros_like(self.graft_ratio, dtype=torch.bool)
        for index in wave:
            mask[index : index + 1].fill_(True)  # an index tensor would come from the host
        return Wave(parts, mask, fits)


def _per_row(values: Tensor) -> Tensor:
    """(rows,) -> (rows, 1, 1)."""
    return values[:, None, None]
