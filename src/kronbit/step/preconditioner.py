"""Update, refresh, precondition: the algorithm on groups of blocks, within the workspace.

A preconditioner knows neither the optimizer nor other ranks. An exchange may assign it a part of
the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.blocks.batches import (
    PRECONDITION,
    ROBUST_UPDATE,
    UPDATE,
    Cost,
    Part,
    Portion,
    batches,
    due_parts,
    portion_of,
    refresh_cost,
    rows_of,
)
from kronbit.blocks.gradients import GradientBlocks
from kronbit.blocks.groups import DeviceStacks, Due, DueMembers, Group, Member, Turn, chunks
from kronbit.distributed.exchange import Exchange
from kronbit.factors import is_root, is_statistic
from kronbit.gpu.measured import Measured
from kronbit.gpu.product_precision import KernelProducts
from kronbit.kernels.cache import BoundedCache
from kronbit.linalg.backend import backend
from kronbit.linalg.precision import full_precision
from kronbit.rules import Algorithm, combine, graft_scale
from kronbit.step.failures import Progress

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain
    from kronbit.statistics.base import MatrixOf


_CACHED_WAVES = 16
_CACHED_CUTS = 256
_ALONE = Exchange()


@dataclass(frozen=True)
class Wave:
    """Parameters that are grafted together.

    Grafting needs the norm of Ĝ over all blocks of a parameter before anything is written, so G and
    Ĝ are held until then. A parameter that is too large forms a wave alone, and its Ĝ is computed
    twice: once for the norm, once to be written.

    Attributes:
        parts: (group, rows) of each chunk.
        mask: bool (members,), on the device: True for the members of the wave.
        fits: True if G and Ĝ are held until they are grafted.
    """

    parts: tuple[tuple[Group, slice], ...]
    mask: Tensor
    fits: bool


class Preconditioner:
    """Second-order state of the parameters on one device, its members.

    Args:
        members: The parameters, in order.
        algorithm: The rule.
        workspace: Limit on transient memory, in bytes.
        graphs: True if launches may be captured as CUDA graphs.
        device: Device of the parameters.
        exchange: Divides updates and refreshes among ranks that hold the same state.

    Attributes:
        stacks: The members' state. ``precondition`` does not touch members that are not refreshed:
            their G̃ is G, bit for bit.
        products: Computes the members' products with kernels, on devices that have them.
        turns: The turns of each member under ``stagger``, ascending.
        all_turns: The turns of all members.
        progress: The updates of a step that is not complete.
    """

    def __init__(
        self,
        members: Sequence[Member],
        algorithm: Algorithm,
        workspace: int,
        graphs: bool,
        device: torch.device,
        exchange: Exchange = _ALONE,
    ) -> None:
        self.exchange, self.progress = exchange, Progress()
        self.stacks = DeviceStacks(members, algorithm.rule, workspace, device)
        self.products = KernelProducts(self.stacks, graphs)
        self._graphs = graphs
        turns: list[set[Turn]] = [set() for _ in members]
        for span in chain.from_iterable(group.spans for group in self.stacks.groups):
            turns[span.member] |= {(span.phase, right) for right in (False, True)}
        self.turns = [tuple(sorted(of_member)) for of_member in turns]
        self.all_turns = {turn for turns in self.turns for turn in turns}
        self._blocks = [len(member.blocking) for member in members]
        self._lengths = torch.tensor(self._blocks, dtype=torch.int64, device=device)
        # Not a method: a reference cycle would keep the stacks in memory until a collection.
        self._waves = lru_cache(_CACHED_WAVES)(partial(_cut_into_waves, self.stacks))
        self._chain: Chain | None = None
        self._cuts: BoundedCache[tuple[Hashable, ...], tuple[list[Due], list[Portion]]] = (
            BoundedCache(_CACHED_CUTS)
        )

    def graph_refused(self) -> str | None:
        """Return why launches could not be captured as graphs; ``None`` if no capture failed."""
        updates_refused = self._chain.graph_refused if self._chain is not None else None
        return self.products.graph_refused() or updates_refused

    # ------------------------------------------------------------------------ statistics, roots

    @full_precision()
    def update(self, measured: Measured, due: DueMembers, M_of: MatrixOf) -> None:
        """Run PU on L and R with their M. Waits for the device.

        Args:
            measured: The members' gradients. A non-finite gradient leaves its statistics unchanged.
            due: The members to update, with their options and blocks.
            M_of: Returns M of a batch.
        """
        with self.exchange.shared(self.stacks, due, measured.norms, is_statistic):
            self._update_assigned(measured.finite, due, M_of)

    def _update_assigned(self, finite: Tensor, due: DueMembers, M_of: MatrixOf) -> None:
        """Run PU on the rows of this rank; retry rows where a factorisation failed."""
        if self._chain is None:
            self._chain = backend(self.stacks.device).chain(self.stacks.device, self._graphs)
        attempt, failed = 0, self._update(self._first_updates(due), M_of, finite)
        while failed := _repairable(failed, attempt, roots=False):
            attempt += 1
            portions = self._cut(failed, ROBUST_UPDATE, attempt)
            failed = self._update(portions, M_of, finite, attempt)

    def _update(
        self, portions: Iterable[Portion], M_of: MatrixOf, finite: Tensor, attempt: int = 0
    ) -> list[Part]:
        """Run PU on batches of rows; return the rows whose factorisation failed, left unchanged."""
        done: list[Part] = []
        flags: list[Tensor] = []
        for parts, batch, members in portions:
            self.progress.begin(parts, batch)
            M = M_of(parts)
            trusted = finite[members]
            good, replaced = batch.update(M, trusted, parts[0].config, attempt, self._chain)
            flags.append(torch.stack((trusted, good, replaced)))
            done += parts
        if not flags:
            return []
        failed = []
        for (part, row), trusted, good, replaced in zip(
            rows_of(done), *torch.cat(flags, 1).tolist(), strict=True
        ):
            if trusted and not good:
                failed.append(part.row(row))
            elif trusted and not replaced:
                part.factors.counters["discarded_statistics"] += 1
        return failed

    def _cut(
        self, wanted: Iterable[Part], cost: Cost | Callable[[Part], Cost], attempt: int | None
    ) -> Iterator[Portion]:
        """Cut rows into batches that fit into the workspace.

        ``attempt`` counts the attempts at an update; it is None for a refresh.
        """
        by_kernels = backend(self.stacks.device).by_kernels

        def mixed(part: Part) -> bool:
            # Padding costs copies, but lets orders share a kernel launch. Torch gains nothing.
            return by_kernels and part.factors.method.allows_padding(part.config, attempt)

        return map(portion_of, batches(wanted, self.stacks.workspace, cost, mixed))

    def _first_updates(self, due: DueMembers) -> Iterable[Portion]:
        if not self.progress.failed():
            return self._cut_due(due, UPDATE, attempt=0)
        assigned = self.exchange.assigned(due_parts(self.stacks.groups, due))
        return self._cut(self.progress.remaining(assigned), UPDATE, attempt=0)

    def _cut_due(
        self,
        due: DueMembers,
        cost: Cost | Callable[[Part], Cost],
        attempt: int | None = None,
    ) -> list[Portion]:
        """Cut all rows that are due. Recent cuts are cached: the GPU idles while the host cuts."""
        # Options are compared by identity: hashing them is slow. Cached values keep them alive.
        dues = ((i, id(blocks.config), blocks.turns) for i, blocks in due.items())
        key = cost, self.exchange.divides, *dues

        def cut() -> tuple[list[Due], list[Portion]]:
            assigned = self.exchange.assigned(due_parts(self.stacks.groups, due))
            return list(due.values()), list(self._cut(assigned, cost, attempt))

        return self._cuts.obtain(key, cut)[1]

    @full_precision()
    def refresh(self, measured: Measured, due: DueMembers) -> None:
        """Run PIRU on L̂ and R̂ of the blocks that are due. Waits for the device.

        The error of products in reduced precision is measured on the gradients. A staggered member
        counts as refreshed once both roots of all its blocks have been refreshed.
        """
        with self.exchange.shared(self.stacks, due, measured.norms, is_root):
            self._refresh_assigned(due)
        staggered = {i for i, blocks in due.items() if blocks.turns is not None}
        before = set(self.stacks.refreshed)
        self.find_refreshed(due.keys() - staggered)
        self.find_refreshed(staggered, whole=True)
        # All blocks of a staggered member are measured together, at its last turn.
        at_last_turn = {i for i in staggered if self.turns[i][-1] in (due[i].turns or ())}
        self.progress.new |= self.stacks.refreshed - before
        new = self.progress.new
        unmeasured = staggered - at_last_turn - new
        self.products.choose(measured, [i for i in due if i not in unmeasured], new)

    def _refresh_assigned(self, due: DueMembers) -> None:
        """Run PIRU on the rows of this rank; retry failed rows with more damping."""
        attempt, failed = 0, self._refresh(self._cut_due(due, refresh_cost))
        while failed := _repairable(failed, attempt, roots=True):
            attempt += 1
            damped = [part.damped_by(10.0**attempt) for part in failed]
            failed = self._refresh(self._cut(damped, refresh_cost, attempt=None))

    def _refresh(self, portions: Iterable[Portion]) -> list[Part]:
        """Run PIRU on batches of rows; return rows whose new root is non-finite and not stored."""
        done: list[Part] = []
        flags: list[Tensor] = []
        for parts, batch, _ in portions:
            flags.append(batch.refresh(parts[0].config))
            done += parts
        replaced = torch.cat(flags).tolist() if flags else []
        rows = zip(rows_of(done), replaced, strict=True)
        return [part.row(row) for (part, row), good in rows if not good]

    def find_refreshed(self, candidates: Collection[int], whole: bool = False) -> None:
        """Record which members have a root that is not the identity. Waits for the device.

        If ``whole``, both roots of all blocks must differ from the identity.
        """
        stacks = self.stacks
        wanted = {i: Due(stacks.members[i].config) for i in set(candidates) - stacks.refreshed}
        if not wanted:
            return
        changed = torch.zeros(2, sum(self._blocks), dtype=torch.bool, device=stacks.device)
        parts = due_parts(stacks.groups, wanted)
        for part in chain.from_iterable(batches(parts, stacks.workspace, PRECONDITION)):
            numbers = part.group.number[part.rows]
            changed[int(part.right), numbers] = ~part.factors.is_identity(part.rows)
        for i, roots in enumerate(changed.cpu().split(self._blocks, 1)):
            if i in wanted and (roots.all() if whole else roots.any()):
                stacks.refreshed.add(i)

    # -------------------------------------------------------------------------------- gradients

    def precondition(self, measured: Measured) -> None:
        """Write G̃ = Ĝ ‖G‖ / ‖Ĝ‖ over the gradients of refreshed members, grafted per parameter.

        Non-finite gradients are unchanged.
        """
        if measured.addresses is None:  # no kernels
            remaining: Sequence[int] = sorted(self.stacks.refreshed)
        else:
            remaining = self.products.precondition(measured, measured.addresses)
        exact = tuple(i for i in remaining if measured.grads[i] is not None)
        if exact:
            members = slice(len(self.stacks.members))
            norms, finite = measured.norms[members], measured.finite[members]
            self._precondition_exactly(exact, measured.grads[members], norms, finite)

    @full_precision()
    def _precondition_exactly(
        self, active: tuple[int, ...], grads: Sequence[Tensor | None], norms: Tensor, finite: Tensor
    ) -> None:
        """Precondition in float32 with torch, group by group: the contract."""
        blocks = GradientBlocks(self.stacks.members, grads)
        # ‖Ĝ‖² of every block, ordered by member and block. The sums run in this order for every
        # choice of chunks, so that their bits are reproducible.
        squares = norms.new_zeros(sum(self._blocks))
        for wave in self._waves(active):
            held = []
            for group, rows in wave.parts:
                G, Ghat = self._product(blocks, group, rows)
                squares[group.number[rows]] = torch.linalg.vector_norm(Ghat, dim=(-2, -1)).square()
                held.append((G, Ghat) if wave.fits else None)
            sums = torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True)
            Ghat_norms = sums.sqrt()
            scale = graft_scale(norms, Ghat_norms)
            # Where Ĝ overflowed although G is finite, F gets G itself.
            usable = finite & torch.isfinite(Ghat_norms) & torch.isfinite(scale)
            self.stacks.ungrafted.add_((wave.mask & finite & ~usable).sum())
            self.stacks.graft_ratio.copy_(torch.where(wave.mask, scale, self.stacks.graft_ratio))
            for (group, rows), pair in zip(wave.parts, held, strict=True):
                members = group.member_of[rows]
                G, Ghat = self._product(blocks, group, rows) if pair is None else pair
                Gtilde = torch.where(_per_row(usable[members]), Ghat * _per_row(scale[members]), G)
                blocks.scatter(group, rows, Gtilde)
            blocks.flush()

    def _product(self, blocks: GradientBlocks, group: Group, rows: slice) -> tuple[Tensor, Tensor]:
        """Return G and Ĝ of the given rows."""
        G = blocks.gather(group, rows)
        return G, combine(self.stacks.rule, group.left.roots(rows), G, group.right.roots(rows))


def _repairable(failed: Iterable[Part], attempt: int, roots: bool) -> list[Part]:
    """Count each failed row under its next repair or as discarded; return the repairable rows.

    Attempts count from 0. ``roots`` is True for a refresh, False for an update.
    """
    repairable = []
    for part in failed:
        method = part.factors.method
        repairs = (method.root_repairs if roots else method.repairs)[attempt:]
        discarded = "discarded_roots" if roots else "discarded_statistics"
        part.factors.counters[repairs[0] if repairs else discarded] += 1
        if repairs:
            repairable.append(part)
    return repairable


def _cut_into_waves(stacks: DeviceStacks, active: tuple[int, ...]) -> list[Wave]:
    """Cut the active members into waves."""
    # Half of the workspace holds G and Ĝ; the other half is the scratch memory of a chunk.
    budget = stacks.workspace // 2
    waves: list[list[int]] = []
    total = 0
    for index in active:
        size = stacks.held_bytes(index)
        if not waves or total + size > budget:
            waves.append([])
            total = 0
        waves[-1].append(index)
        total += size
    return [_make_wave(stacks, wave, budget) for wave in waves]


def _make_wave(stacks: DeviceStacks, wave: list[int], budget: int) -> Wave:
    wanted = dict.fromkeys(wave, Due(stacks.members[wave[0]].config))
    parts = tuple(
        (group, rows)
        for group in stacks.groups
        for run, _ in group.runs(wanted, right=False)  # equal on both sides
        for rows in chunks(run, PRECONDITION.rows(max(group.shape), group.shape, budget))
    )
    mask = torch.zeros_like(stacks.graft_ratio, dtype=torch.bool)
    for index in wave:
        mask[index : index + 1].fill_(True)  # an index tensor would come from the host
    return Wave(parts, mask, fits=sum(map(stacks.held_bytes, wave)) <= budget)


def _per_row(values: Tensor) -> Tensor:
    """Reshape (rows,) to (rows, 1, 1), which broadcasts to blocks."""
    return values[:, None, None]
