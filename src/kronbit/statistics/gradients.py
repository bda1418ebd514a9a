"""Shampoo's statistics: M = G Gᵀ for L and Gᵀ G for R."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronbit.blocks.batches import Part, order_of
from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.gradients import GradientBlocks
from kronbit.blocks.groups import DeviceStacks, Due
from kronbit.config import Config
from kronbit.distributed.sharding import local
from kronbit.gpu.norms import Measured
from kronbit.linalg.products import multiply, operand
from kronbit.statistics.base import DevicePart, Source

if TYPE_CHECKING:
    from kronbit.gpu.outer_products import OuterProducts


class GradientStatistics:
    """Every parameter is cut into blocks by itself; M is made of the step's gradient alone."""

    name = "gradients"
    collects = False
    takes_shards = True

    def __init__(self) -> None:
        self._tables: weakref.WeakKeyDictionary[DeviceStacks, OuterProducts] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        # Tables belong to stacks, which are not copied.
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tables=weakref.WeakKeyDictionary())

    def adopt(self, params: Collection[Tensor]) -> None:
        """Nothing to do: shapes say it all."""

    def route(self, p: Tensor, config: Config) -> Blocking | str:
        """How a parameter is cut, or why it is left to the base optimizer."""
        return route(tuple(local(p).shape if config.blocks == "local" else p.shape), config)

    def matrices(
        self, params: Sequence[Tensor], planned: Container[Tensor], grads: list[Tensor]
    ) -> AbstractContextManager[list[Tensor]]:
        """The gradients themselves."""
        return nullcontext(grads)

    def source(self, part: DevicePart, due: Mapping[int, Due]) -> Source:
        """What an update takes."""
        return Source(due, self.outer_products(part.stacks, part.measured, due))

    def outer_products(
        self, stacks: DeviceStacks, measured: Measured, due: Mapping[int, Due]
    ) -> Callable[[Sequence[Part]], Tensor]:
        """What finds M of a batch: by kernels, if they can read all gradients that are due."""
        addresses, members = measured.addresses, stacks.members
        if addresses is not None and all(map(addresses.values.__getitem__, due)):
            from kronbit.gpu.outer_products import OuterProducts

            if stacks not in self._tables:
                self._tables[stacks] = OuterProducts(members, stacks.device)
            return partial(self._tables[stacks].of, addresses.tensor, measured.finite)
        return partial(_by_torch, GradientBlocks(members, measured.grads), measured.finite)

    def expect(self, params: Iterable[Tensor]) -> None:
        """Nothing to do: gradients are there anyway."""

    def counts(self) -> dict[str, int]:
        """Nothing can go wrong."""
        return {}


def _by_torch(blocks: GradientBlocks, finite: Tensor, parts: Sequence[Part]) -> Tensor:
    n, count = order_of(parts), sum(part.rows.stop - part.rows.start for part in parts)
    M = torch.zeros(count, n, n, dtype=torch.float32, device=finite.device)
    start = 0
    for part in parts:
        here = slice(start, start + part.rows.stop - part.rows.start)
        start = here.stop
        trusted = finite[part.group.owner[part.rows]]
        G = blocks.gather(part.group, part.rows)
        G.masked_fill_(~trusted[:, None, None], 0.0)  # not a product: 0 times NaN is NaN
        g = operand(G.mT if part.right else G)
        if part.factors.order == n:
            multiply(g, g.mT, symmetric=True, out=M[here])
        else:
            M[here, : part.factors.order, : part.factors.order] = multiply(g, g.mT, symmetric=True)
        del G, g
    return M
