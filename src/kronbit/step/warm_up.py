"""Compiling the kernels of a run side by side, before its first steps need them one by one."""

from __future__ import annotations

from functools import cache

import torch

from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.gradients import plain_dtypes
from kronbit.blocks.groups import Due, Member
from kronbit.config import FORMAT_OPTIONS, Config
from kronbit.gpu.product_precision import BF16X3, HALF
from kronbit.kernels.launch import compile_together
from kronbit.linalg.orthogonal import FIRST_ATTEMPT
from kronbit.rules import Algorithm
from kronbit.statistics import GradientStatistics
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner

# Of parameters that stay in float32 or are quantised, and are multiplied in small or large tiles.
_SHAPES = ((8, 8), (320, 320), (256, 512))


def warm_up(device: torch.device, algorithm: Algorithm, config: Config, dtype: torch.dtype) -> None:
    """Compile the kernels for parameters with some options; later calls do nothing.

    What is compiled and never used costs time, but little; what is missed here is compiled when it
    is needed.

    Args:
        device: Where they are.
        algorithm: Rule and root.
        config: Their options.
        dtype: Of their gradients: bf16, or anything else; for all else, kernels are the same.
    """
    decisive = (*FORMAT_OPTIONS, "root", "nonfinite")
    options = {name: getattr(config, name) for name in decisive}
    _warm_up(device, algorithm, Config(**options), dtype)


@cache
def _warm_up(
    device: torch.device, algorithm: Algorithm, config: Config, dtype: torch.dtype
) -> None:
    ways = [route(shape, config) for shape in _SHAPES]
    members = [Member(way, config) for way in ways if isinstance(way, Blocking)]
    due = {i: Due(config) for i in range(len(members))}
    shapes = [member.blocking.matrices for member in members]
    grads = [torch.zeros(shape, dtype=dtype, device=device).squeeze(0) for shape in shapes]
    guard = NonfiniteGuard(device, config)

    def every_kind_of_step() -> None:
        own = Preconditioner(members, algorithm, 2**24, graphs=False, device=device)
        sizes = [grad.numel() for grad in grads]
        measured = guard.measure(grads, sizes, (), plain_dtypes(grads))
        assert measured.addresses is not None
        M_of = GradientStatistics().outer_products(own.stacks, measured, due)
        own._update(own._first_updates(due), M_of, measured.finite, FIRST_ATTEMPT)
        own.stacks.refreshed.update(due)
        own.refresh(measured, due)
        for way, some in ((HALF, (0, 1)), (HALF, (2,)), (BF16X3, (0, 1, 2))):
            chosen = ((way, frozenset(some)),)
            own.products.step(chosen, measured.addresses, measured.norms)

    compile_together(every_kind_of_step)
