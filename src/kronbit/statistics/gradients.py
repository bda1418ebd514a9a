"""Shampoo's statistics: M = G Gᵀ for L and Gᵀ G for R."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kronbit.blocks.batches import Part
from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.gradients import GradientBlocks
from kronbit.blocks.groups import DeviceStacks, DueMembers
from kronbit.config import Config
from kronbit.distributed.sharding import local
from kronbit.gpu.measured import Measured
from kronbit.linalg.products import multiply, operand
from kronbit.statistics.base import MatrixOf, ParamOf, Statistics, rows_in_batch, zeros_for


class GradientStatistics(Statistics):
    """Cuts each parameter into blocks; M is computed from the gradient of the step."""

    name = "gradients"
    takes_shards = True

    def route(self, p: Tensor, config: Config) -> Blocking | str:
        """Return how a parameter is cut, or why it is left to the base optimizer."""
        return route(tuple(local(p).shape if config.blocks == "local" else p.shape), config)

    def source(
        self, stacks: DeviceStacks, measured: Measured, due: DueMembers, param: ParamOf
    ) -> tuple[DueMembers, MatrixOf]:
        """Return all members that are due, and the function for M."""
        return due, self.outer_products(stacks, measured, due)

    def outer_products(self, stacks: DeviceStacks, measured: Measured, due: DueMembers) -> MatrixOf:
        """Return the function for M, with kernels if they can read all gradients that are due."""
        addresses, members = measured.addresses, stacks.members
        if addresses is not None and all(map(addresses.values.__getitem__, due)):
            from kronbit.gpu.outer_products import OuterProducts

            if stacks.outer_product_tables is None:
                stacks.outer_product_tables = OuterProducts(members, stacks.device)
            return partial(stacks.outer_product_tables.of, addresses.tensor, measured.finite)
        return partial(_by_torch, GradientBlocks(members, measured.grads), measured.finite)


def _by_torch(blocks: GradientBlocks, finite: Tensor, parts: Sequence[Part]) -> Tensor:
    """Compute M of a batch in torch. M of a gradient that is not finite is zero."""
    M = zeros_for(parts, finite.device)
    for part, rows in rows_in_batch(parts):
        n, trusted = part.factors.order, finite[part.group.member_of[part.rows]]
        G = blocks.gather(part.group, part.rows)
        G.masked_fill_(~trusted[:, None, None], 0.0)  # not a product: 0 times NaN is NaN
        g = operand(G.mT if part.right else G)
        if n == M.shape[1]:
            multiply(g, g.mT, symmetric=True, out=M[rows])
        else:
            M[rows, :n, :n] = multiply(g, g.mT, symmetric=True)
        del G, g
    return M
