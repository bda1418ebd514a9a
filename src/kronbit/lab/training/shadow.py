"""The exact preconditioners beside the quantised ones, while a network is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronbit.blocks.blocking import Block, Blocking
from kronbit.config import Config
from kronbit.distributed.sharding import is_distributed
from kronbit.factors.dense import decay_weights
from kronbit.lab.errors import LabError
from kronbit.lab.quantisation.errors import Deviation, Statistic, deviations
from kronbit.optimizer import SecondOrder

_SIDES = ("left", "right")


@dataclass(eq=False)
class _Watch:
    """One block that is watched.

    Attributes:
        name: Of its parameter, and of the block if there are several.
        p: The parameter.
        group: Its number among the param groups.
        matrices: (E, M, N), the parameter seen as a stack of matrices.
        block: Where the block lies in them.
        exact: A by side, float64, on the host.
        seen: Steps of the parameter before the one that is being taken.
        G: The block's gradient there, if the statistics are due and it is finite.
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
        """G in float64; ``None`` if the optimizer does not trust the gradient."""
        grad = self.p.grad
        assert grad is not None
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not bool(torch.isfinite(torch.linalg.vector_norm(grad, dtype=wide).float())):
            return None
        own = self.block
        rows, columns = slice(own.row, own.row + own.m), slice(own.column, own.column + own.n)
        found = grad.detach().reshape(self.matrices)[own.batch, rows, columns]
        return found.to(torch.float64, copy=True)

    def update(self, G: Tensor, beta: float) -> None:
        """A ← β A + (1 - β) M on both sides."""
        decay, weight = decay_weights(beta)
        for side, M in (("left", G @ G.mT), ("right", G.mT @ G)):
            self.exact[side].mul_(decay).add_(M.cpu(), alpha=weight)


class Shadow:
    """Keeps the preconditioners of a few blocks exactly, to tell the errors of the stored roots.

    Of each preconditioned parameter the largest block counts, and of these the largest are watched.
    They are kept in float64 on the host. Call ``before_step`` between ``backward`` (with unscaling
    and clipping) and ``optimizer.step()``, and ``after_step`` behind that.

    Nothing is watched where it is not known here what a root should be: with statistics of
    activations (KFAC, AdaBK), staggered schedules, parameters that are sharded over ranks,
    ``shard_state=True``, and on all ranks but the first.

    Args:
        optimizer: ``Shampoo`` or ``CASPR``, before its first step, or with ``load_state_dict`` to
            follow.
        names: What parameters are called.
        blocks: How many to watch.
        aside: Entered while it is at work, which is no part of the training's time and memory.
    """

    def __init__(
        self,
        optimizer: SecondOrder,
        names: Mapping[Tensor, str],
        blocks: int = 4,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._optimizer, self._aside = optimizer, aside
        self._watches = [] if _knows_nothing(optimizer) else _largest(optimizer, names, blocks)

    @property
    def watches(self) -> tuple[str, ...]:
        """The blocks that are watched, by name."""
        return tuple(watch.name for watch in self._watches)

    @torch.no_grad()
    def before_step(self) -> None:
        """Take the gradients of a step that updates statistics."""
        due = []
        for watch in self._watches:
            watch.seen, watch.G = self._steps(watch), None
            if watch.p.grad is not None and self._config(watch).updates_at(watch.seen + 1):
                due.append(watch)
        if due:
            with self._aside():
                for watch in due:
                    watch.G = watch.gradient()

    @torch.no_grad()
    def after_step(self) -> dict[str, Any] | None:
        """Follow the step that was taken.

        Returns:
            ``None``, unless roots were refreshed: then the means of their errors, ``nre`` and
            ``angle`` (degrees), the same without diagonals under ``off_diagonal``, and those of
            each root under ``blocks``.
        """
        # A step may have been skipped, by a gradient scaler, say.
        taken = [watch for watch in self._watches if self._steps(watch) == watch.seen + 1]
        updated = [(watch, watch.G) for watch in taken if watch.G is not None]
        refreshed = [w for w in taken if self._config(w).refreshes_at(w.seen + 1)]
        if not updated and not refreshed:
            return None
        with self._aside():
            for watch, G in updated:
                watch.update(G, self._config(watch).beta)
                watch.G = None
            if not refreshed:
                return None
            found = self._errors(refreshed)
        whole, beside = zip(*found.values(), strict=True)
        return {
            **_mean(whole),
            "off_diagonal": _mean(beside),
            "blocks": {name: asdict(own) for name, (own, _) in found.items()},
        }

    def _errors(self, refreshed: list[_Watch]) -> dict[str, tuple[Deviation, Deviation]]:
        plan = self._optimizer._plan
        assert plan is not None, "a step has been taken"
        planned = {(block.p, block.key): block for block in plan.blocks()}
        found = {}
        for watch in refreshed:
            own = planned[watch.p, f"block_{watch.block.index}"]
            for side, factors in own.sides.items():
                root = factors.roots(slice(own.row, own.row + 1))[0]
                A = watch.exact[side].to(root.device)
                exact = Statistic.of(A, self._config(watch)).root()
                found[f"{watch.name} {side}"] = deviations(root, exact)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The exact preconditioners by name and side."""
        return {
            f"{watch.name} {side}": A for watch in self._watches for side, A in watch.exact.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned.

        Raises:
            LabError: If it is of other blocks.
        """
        own = self.state_dict()
        for name in own.keys() ^ state_dict.keys():
            where = "not watched here" if name in state_dict else "not in the checkpoint"
            raise LabError(f"exact preconditioners of other blocks: {name} is {where}")
        for name, A in own.items():
            if state_dict[name].shape != A.shape:
                raise LabError(
                    f"the exact preconditioner {name} has shape {tuple(state_dict[name].shape)} in "
                    f"the checkpoint; expected {tuple(A.shape)}"
                )
            A.copy_(state_dict[name])

    def _config(self, watch: _Watch) -> Config:
        return self._optimizer._config_of(self._optimizer.param_groups[watch.group])

    def _steps(self, watch: _Watch) -> int:
        """Gradients that a parameter has seen."""
        # Not by [], which would make an entry.
        return int(self._optimizer.state.get(watch.p, {}).get("step", 0))


def _mean(found: Sequence[Deviation]) -> dict[str, float]:
    """Of both errors."""
    return {
        name: sum(getattr(own, name) for own in found) / len(found) for name in ("nre", "angle")
    }


def _knows_nothing(optimizer: SecondOrder) -> bool:
    return (
        optimizer._statistics.name != "gradients"
        or optimizer.config.shard_state
        or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0)
    )


def _largest(optimizer: SecondOrder, names: Mapping[Tensor, str], blocks: int) -> list[_Watch]:
    """The largest block of each parameter, as many as are wanted; of equal ones the first."""
    found: list[tuple[tuple[int, int], _Watch]] = []
    for number, group in enumerate(optimizer.param_groups):
        config = optimizer._config_of(group)
        for p in group["params"]:
            cut = optimizer._statistics.route(p, config)
            if isinstance(cut, str) or config.stagger or is_distributed(p) or not p.requires_grad:
                continue
            size, block = _largest_block(cut)
            name = names[p] if len(cut) == 1 else f"{names[p]} block_{block.index}"
            found.append((size, _Watch(name, p, number, cut.matrices, block, {})))
    # Sorting is stable: of equal ones, the first.
    watches = [own for _, own in sorted(found, key=lambda pair: pair[0], reverse=True)[:blocks]]
    for watch in watches:
        start = optimizer._config_of(optimizer.param_groups[watch.group]).start_value
        for side, order in zip(_SIDES, (watch.block.m, watch.block.n), strict=True):
            watch.exact[side] = start * torch.eye(order, dtype=torch.float64)
    return watches


def _largest_block(cut: Blocking) -> tuple[tuple[int, int], Block]:
    """By its larger side, then by the other; with both."""
    grid = max(cut.grids, key=lambda own: (max(own.shape), min(own.shape)))
    return (max(grid.shape), min(grid.shape)), next(grid.blocks())
