"""Exact preconditioners, kept beside the quantised ones during training."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from kronbit.blocks.blocking import Block
from kronbit.config import Config
from kronbit.distributed.sharding import is_distributed
from kronbit.factors.dense import decay_weights
from kronbit.lab.errors import LabError
from kronbit.lab.quantization.errors import Deviation, Statistic, deviations
from kronbit.optimizer import SecondOrder
from kronbit.step.schedule import refreshes_at, updates_at


@dataclass(eq=False)
class _Watch:
    """A watched block."""

    name: str  # of the parameter, and of the block if the parameter has several
    p: Tensor
    config: Config
    matrices: tuple[int, int, int]  # (E, M, N), shape of the parameter as a stack of matrices
    block: Block  # position in this stack
    exact: dict[str, Tensor]  # A per side, in float64 on the host
    seen: int = 0  # steps of the parameter before the current one
    G: Tensor | None = None  # if the statistics are due and the gradient is finite

    def gradient(self) -> Tensor | None:
        """Return G in float64, or ``None`` if the optimizer skips the gradient as not finite."""
        grad = self.p.grad
        assert grad is not None
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not bool(torch.isfinite(torch.linalg.vector_norm(grad, dtype=wide).float())):
            return None
        b = self.block
        G = grad.detach().reshape(self.matrices)[b.matrix]
        return G[b.row : b.row + b.m, b.column : b.column + b.n].to(torch.float64, copy=True)

    def update(self, G: Tensor) -> None:
        """Update both sides: A ← β A + (1 - β) M."""
        decay, weight = decay_weights(self.config.beta)
        for side, M in (("left", G @ G.mT), ("right", G.mT @ G)):
            self.exact[side].mul_(decay).add_(M.cpu(), alpha=weight)
        self.G = None  # frees the memory


class Shadow:
    """Keeps exact preconditioners of a few blocks, to measure the errors of the stored roots.

    The candidates are the largest block of each preconditioned parameter; the largest candidates
    are watched. Their preconditioners are in float64 on the host. Call ``before_step`` after
    ``backward``, unscaling and clipping, and ``after_step`` after ``optimizer.step()``.

    Nothing is watched if the exact root is unknown here: for KFAC and AdaBK (statistics of layers),
    first-order optimizers, staggered schedules, parameters that are sharded over ranks,
    ``shard_state=True``, and on all ranks but the first.

    Args:
        optimizer: The optimizer, before its first step or before ``load_state_dict``.
        names: Names of the parameters.
        blocks: Number of blocks to watch.
        aside: Context of the measurements, which excludes them from time and memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Tensor, str],
        blocks: int = 4,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._optimizer, self._aside = optimizer, aside
        self.watches: list[_Watch] = []
        if (
            isinstance(optimizer, SecondOrder)
            and optimizer._statistics.name == "gradients"
            and not optimizer.config.shard_state
            and not (dist.is_initialized() and dist.get_rank())
        ):
            self.watches = _largest(optimizer, names, blocks)

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the gradients, if the coming step updates statistics."""
        for watch in self.watches:
            watch.seen, watch.G = self._steps(watch), None
        due = [w for w in self.watches if w.p.grad is not None and updates_at(w.config, w.seen + 1)]
        if due:
            with self._aside():
                for watch in due:
                    watch.G = watch.gradient()

    @torch.no_grad()
    def after_step(self) -> dict[str, Any] | None:
        """Update the exact preconditioners, and measure roots that were refreshed, if any.

        Returns the mean errors ``nre`` and ``angle`` (degrees), the same without diagonals under
        ``off_diagonal``, and the errors of each root under ``blocks``.
        """
        # A gradient scaler may have skipped the step.
        taken = [watch for watch in self.watches if self._steps(watch) == watch.seen + 1]
        refreshed = [watch for watch in taken if refreshes_at(watch.config, watch.seen + 1)]
        if not refreshed and all(watch.G is None for watch in taken):
            return None
        with self._aside():
            for watch in taken:
                if watch.G is not None:
                    watch.update(watch.G)
            errors = self._errors(refreshed)
        if not errors:
            return None
        whole, beside = zip(*errors.values(), strict=True)
        return {
            **_mean(whole),
            "off_diagonal": _mean(beside),
            "blocks": {name: asdict(whole) for name, (whole, _) in errors.items()},
        }

    def _errors(self, refreshed: list[_Watch]) -> dict[str, tuple[Deviation, Deviation]]:
        assert isinstance(self._optimizer, SecondOrder)
        plan = self._optimizer._keeper.plan
        assert plan is not None, "a step has been taken"
        planned = {(p, key): (row, sides) for p, key, row, sides in plan.blocks()}
        errors = {}
        for watch in refreshed:
            row, sides = planned[watch.p, f"block_{watch.block.index}"]
            for side, factors in sides.items():
                root = factors.roots(slice(row, row + 1))[0]
                A = watch.exact[side].to(root.device)
                exact = Statistic.of(A, watch.config).root()
                errors[f"{watch.name} {side}"] = deviations(root, exact)
        return errors

    def state_dict(self) -> dict[str, Tensor]:
        """Return the exact preconditioners by name and side."""
        return {
            f"{watch.name} {side}": A for watch in self.watches for side, A in watch.exact.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``.

        Raises:
            LabError: If the blocks differ.
        """
        current = self.state_dict()
        for name in current.keys() ^ state_dict.keys():
            where = "not watched here" if name in state_dict else "not in the checkpoint"
            raise LabError(f"exact preconditioners of other blocks: {name} is {where}")
        for name, A in current.items():
            A.copy_(state_dict[name])

    def _steps(self, watch: _Watch) -> int:
        """Return the number of steps of the watched parameter."""
        # Indexing with [] would create an entry.
        return int(self._optimizer.state.get(watch.p, {}).get("step", 0))


def _mean(deviations: Sequence[Deviation]) -> dict[str, float]:
    """Return the mean of both errors."""
    sums = {name: sum(getattr(one, name) for one in deviations) for name in ("nre", "angle")}
    return {name: total / len(deviations) for name, total in sums.items()}


def _largest(optimizer: SecondOrder, names: Mapping[Tensor, str], blocks: int) -> list[_Watch]:
    """Return the largest candidates, in order of size; among equal sizes, the first."""
    watches = []
    for group in optimizer.param_groups:
        config = optimizer._groups.config_of(group)
        for p in group["params"]:
            cut = optimizer._statistics.route(p, config)
            if isinstance(cut, str) or config.stagger or is_distributed(p) or not p.requires_grad:
                continue
            block = next(max(cut.grids, key=lambda grid: sorted(grid.shape)[::-1]).blocks())
            name = names[p] if len(cut) == 1 else f"{names[p]} block_{block.index}"
            watches.append(_Watch(name, p, config, cut.matrices, block, {}))
    largest = heapq.nlargest(blocks, watches, lambda w: sorted((w.block.m, w.block.n))[::-1])
    for watch in largest:
        for side, order in (("left", watch.block.m), ("right", watch.block.n)):
            watch.exact[side] = watch.config.start_value * torch.eye(order, dtype=torch.float64)
    return largest
