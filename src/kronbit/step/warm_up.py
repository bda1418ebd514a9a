"""Compilation of a run's kernels in parallel, before the first steps need them one by one."""

from __future__ import annotations

from functools import cache

import torch

from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.gradients import plain_dtypes
from kronbit.blocks.groups import Due, Member
from kronbit.config import FORMAT_OPTIONS, Config
from kronbit.kernels.launch import compile_together
from kronbit.linalg.precision import BF16X3, HALF
from kronbit.rules import Algorithm
from kronbit.statistics import GradientStatistics
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner

# Shapes whose factors are float32 and quantised, and whose products have small and large tiles.
_SHAPES = ((8, 8), (320, 320), (256, 512))


def warm_up(device: torch.device, algorithm: Algorithm, config: Config, dtype: torch.dtype) -> None:
    """Compile the kernels for parameters with these options. Repeated calls do nothing.

    There are kernels for bf16 gradients, and kernels for all other dtypes. A kernel that is missed
    here is compiled at its first use.
    """
    relevant = (*FORMAT_OPTIONS, "root", "nonfinite")
    options = {name: getattr(config, name) for name in relevant}
    _warm_up(device, algorithm, Config(**options), dtype)


@cache
def _warm_up(
    device: torch.device, algorithm: Algorithm, config: Config, dtype: torch.dtype
) -> None:
    routes = [route(shape, config) for shape in _SHAPES]
    members = [Member(cut, config) for cut in routes if isinstance(cut, Blocking)]
    due = {i: Due(config) for i in range(len(members))}
    shapes = [member.blocking.matrices for member in members]
    grads = [torch.zeros(shape, dtype=dtype, device=device).squeeze(0) for shape in shapes]
    guard = NonfiniteGuard(device, config)

    def run_every_kernel() -> None:
        preconditioner = Preconditioner(members, algorithm, 2**24, graphs=False, device=device)
        sizes = [grad.numel() for grad in grads]
        measured = guard.measure(grads, sizes, (), plain_dtypes(grads))
        assert measured.addresses is not None
        M_of = GradientStatistics().outer_products(preconditioner.stacks, measured, due)
        updates = preconditioner._first_updates(due)
        preconditioner._update(updates, M_of, measured.finite)
        preconditioner.stacks.refreshed.update(due)
        preconditioner.refresh(measured, due)
        for precision, indices in ((HALF, (0, 1)), (HALF, (2,)), (BF16X3, (0, 1, 2))):
            chosen = ((precision, frozenset(indices)),)
            preconditioner.products.step(chosen, measured.addresses, measured.norms)

    compile_together(run_every_kernel)
