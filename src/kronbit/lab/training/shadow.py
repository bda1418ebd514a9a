"""Exact preconditioners, kept beside the quantised ones during a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocks.blocking import Block
from kronbit.config import Config
from kronbit.distributed.sharding import is_distributed
from kronbit.factors.dense import decay_weights
from kronbit.lab.errors import LabError
from kronbit.lab.quantisation.errors import Deviation, Statistic, deviations
from kronbit.optimizer import SecondOrder
from kronbit.step.schedule import refreshes_at, updates_at

_SIDES = ("left", "right")


@dataclass(eq=False)
class _Watch:
    """A watched block.

    Attributes:
        name: Name of the parameter, and of the block if the parameter has several.
        p: The parameter.
        group: Index of the parameter's group.
        matrices: (E, M, N), shape of the parameter as a stack of matrices.
        block: Position of the block in this stack.
        exact: A per side, in float64 on the host.
        seen: Steps of the parameter before the current one.
        G: Gradient of the block, if the statistics are due and the gradient is finite.
    """

    name: str
    p: Tensor
    group: int
    matrices: tuple[int, int, int]
    block: Block
    exact: dict[str, Tensor]
    seen: int = 0
    G: Tensor | None = field(default=None, repr=False)

    def gradient(self) -> Tensor | None:
        """Return G in float64, or ``None`` if the optimizer skips the gradient as not finite."""
        grad = self.p.grad
        assert grad is not None
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not bool(torch.isfinite(torch.linalg.vector_norm(grad, dtype=wide).float())):
            return None
        block = self.block
        rows, columns = (
            slice(block.row, block.row + block.m),
            slice(block.column, block.column + block.n),
        )
        G = grad.detach().reshape(self.matrices)[block.batch, rows, columns]
        return G.to(torch.float64, copy=True)

    def update(self, G: Tensor, beta: float) -> None:
        """Update both sides: A ← β A + (1 - β) M."""
        decay, weight = decay_weights(beta)
        for side, M in (("left", G @ G.mT), ("right", G.mT @ G)):
            self.exact[side].mul_(decay).add_(M.cpu(), alpha=weight)


class Shadow:
    """Keeps exact preconditioners of a few blocks, to measure the errors of the stored roots.

    The candidates are the largest block of each preconditioned parameter; the largest candidates
    are watched. Their preconditioners are in float64 on the host. Call ``before_step`` after
    ``backward``, unscaling and clipping, and ``after_step`` after ``optimizer.step()``.

    Nothing is watched if the exact root is unknown here: with statistics of activations (KFAC,
    AdaBK), staggered schedules, parameters that are sharded over ranks, ``shard_state=True``, and
    on all ranks but the first.

    Args:
        optimizer: ``Shampoo`` or ``CASPR``, before its first step or before ``load_state_dict``.
        names: Names of the parameters.
        blocks: Number of blocks to watch.
        aside: Context of the measurements, which excludes them from time and memory.
    """

    def __init__(
        self,
        optimizer: SecondOrder,
        names: Mapping[Tensor, str],
        blocks: int = 4,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._optimizer, self._aside = optimizer, aside
        self._watches = [] if _cannot_watch(optimizer) else _largest(optimizer, names, blocks)

    @property
    def watches(self) -> tuple[str, ...]:
        """Names of the watched blocks."""
        return tuple(watch.name for watch in self._watches)

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the gradients, if the coming step updates statistics."""
        due = []
        for watch in self._watches:
            watch.seen, watch.G = self._steps(watch), None
            if watch.p.grad is not None and updates_at(self._config(watch), watch.seen + 1):
                due.append(watch)
        if due:
            with self._aside():
                for watch in due:
                    watch.G = watch.gradient()

    @torch.no_grad()
    def after_step(self) -> dict[str, Any] | None:
        """Update the exact preconditioners, and measure roots that were refreshed.

        Returns:
            ``None`` if no root was refreshed. Otherwise the mean errors ``nre`` and ``angle``
            (degrees), the same without diagonals under ``off_diagonal``, and the errors of each
            root under ``blocks``.
        """
        # A gradient scaler may have skipped the step.
        taken = [watch for watch in self._watches if self._steps(watch) == watch.seen + 1]
        updated = [(watch, watch.G) for watch in taken if watch.G is not None]
        refreshed = [w for w in taken if refreshes_at(self._config(w), w.seen + 1)]
        if not updated and not refreshed:
            return None
        with self._aside():
            for watch, G in updated:
                watch.update(G, self._config(watch).beta)
                watch.G = None
            if not refreshed:
                return None
            errors = self._errors(refreshed)
        whole, beside = zip(*errors.values(), strict=True)
        return {
            **_mean(whole),
            "off_diagonal": _mean(beside),
            "blocks": {name: asdict(whole) for name, (whole, _) in errors.items()},
        }

    def _errors(self, refreshed: list[_Watch]) -> dict[str, tuple[Deviation, Deviation]]:
        plan = self._optimizer._keeper.plan
        assert plan is not None, "a step has been taken"
        planned = {(block.p, block.key): block for block in plan.blocks()}
        errors = {}
        for watch in refreshed:
            block = planned[watch.p, f"block_{watch.block.index}"]
            for side, factors in block.sides.items():
                root = factors.roots(slice(block.row, block.row + 1))[0]
                A = watch.exact[side].to(root.device)
                exact = Statistic.of(A, self._config(watch)).root()
                errors[f"{watch.name} {side}"] = deviations(root, exact)
        return errors

    def state_dict(self) -> dict[str, Tensor]:
        """Return the exact preconditioners by name and side."""
        return {
            f"{watch.name} {side}": A for watch in self._watches for side, A in watch.exact.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``.

        Raises:
            LabError: If the blocks or their shapes differ.
        """
        current = self.state_dict()
        for name in current.keys() ^ state_dict.keys():
            where = "not watched here" if name in state_dict else "not in the checkpoint"
            raise LabError(f"exact preconditioners of other blocks: {name} is {where}")
        for name, A in current.items():
            if state_dict[name].shape != A.shape:
                raise LabError(
                    f"the exact preconditioner {name} has shape {tuple(state_dict[name].shape)} in "
                    f"the checkpoint; expected {tuple(A.shape)}"
                )
            A.copy_(state_dict[name])

    def _config(self, watch: _Watch) -> Config:
        return self._optimizer._groups.config_of(self._optimizer.param_groups[watch.group])

    def _steps(self, watch: _Watch) -> int:
        """Return the number of steps of the watched parameter."""
        # Indexing with [] would create an entry.
        return int(self._optimizer.state.get(watch.p, {}).get("step", 0))


def _mean(deviations: Sequence[Deviation]) -> dict[str, float]:
    """Return the mean of both errors."""
    return {
        name: sum(getattr(one, name) for one in deviations) / len(deviations)
        for name in ("nre", "angle")
    }


def _cannot_watch(optimizer: SecondOrder) -> bool:
    """True if exact roots are unknown here; see ``Shadow``."""
    return (
        optimizer._statistics.name != "gradients"
        or optimizer.config.shard_state
        or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0)
    )


def _largest(optimizer: SecondOrder, names: Mapping[Tensor, str], blocks: int) -> list[_Watch]:
    """Return the largest candidates, in order of size; among equal sizes, the first."""
    watches = []
    for number, group in enumerate(optimizer.param_groups):
        config = optimizer._groups.config_of(group)
        for p in group["params"]:
            cut = optimizer._statistics.route(p, config)
            if isinstance(cut, str) or config.stagger or is_distributed(p) or not p.requires_grad:
                continue
            block = next(max(cut.grids, key=lambda grid: _size(*grid.shape)).blocks())
            name = names[p] if len(cut) == 1 else f"{names[p]} block_{block.index}"
            watches.append(_Watch(name, p, number, cut.matrices, block, {}))
    # Sorting is stable: among equal sizes, the first wins.
    watches.sort(key=lambda watch: _size(watch.block.m, watch.block.n), reverse=True)
    for watch in watches[:blocks]:
        start = optimizer._groups.config_of(optimizer.param_groups[watch.group]).start_value
        for side, order in zip(_SIDES, (watch.block.m, watch.block.n), strict=True):
            watch.exact[side] = start * torch.eye(order, dtype=torch.float64)
    return watches[:blocks]


def _size(m: int, n: int) -> tuple[int, int]:
    """Return a sort key: the larger side, then the smaller."""
    return max(m, n), min(m, n)
