"""Preconditioners with roots far from the identity, and measured gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronbit import Shampoo
from kronbit.blocks.blocking import route
from kronbit.blocks.gradients import plain_dtypes
from kronbit.blocks.groups import Member
from kronbit.config import Config
from kronbit.gpu.measured import Measured
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner

# Rows of (12, 64) and (75, 40) are wide (read 16 bytes at a time): in bf16, they are multiplied in
# place.
SHAPES = [(20, 66), (12, 64), (2, 10, 24), (75, 40)]
SINGLE = [torch.float32] * 4
MIXED = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
ALL_BF16 = [torch.bfloat16] * 4
PASS = Config(nonfinite="pass")


def make_preconditioner(
    device: torch.device,
    algorithm: Any = Shampoo,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    workspace: int = 2**21,
    **options: Any,
) -> Preconditioner:
    """Make a preconditioner of several shapes and formats, with roots far from the identity."""
    config = Config(**{"storage": "paper", "max_order": 70, **options})
    members = [Member(route(shape, config), config) for shape in shapes]
    preconditioner = Preconditioner(members, algorithm.algorithm, workspace, False, device)
    for group in preconditioner.stacks.groups:
        for factors in (group.left, group.right):
            A = torch.randn(factors.rows, factors.order, factors.order) / factors.order**0.5
            for name, leaf in factors.method.root.encode(
                (A @ A.mT + torch.eye(factors.order)).to(device)
            ).items():
                factors.tensors[name].copy_(leaf)
    preconditioner.find_refreshed(range(len(shapes)))
    return preconditioner


def measure(
    device: torch.device, grads: Sequence[Tensor | None], guard: NonfiniteGuard | None = None
) -> Measured:
    """Measure gradients as a step does."""
    sizes = [0 if grad is None else grad.numel() for grad in grads]
    taps = [1 if grad is None else math.prod(grad.shape[2:]) for grad in grads]
    dtypes = plain_dtypes([grad for grad in grads if grad is not None])
    return (guard or NonfiniteGuard(device, PASS)).measure(grads, sizes, taps, dtypes)


def gradients(device: torch.device, dtypes: list[torch.dtype]) -> list[Tensor]:
    return [
        torch.randn(shape).to(device=device, dtype=dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]
