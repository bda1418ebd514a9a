"""How much memory an optimizer will take, without allocating any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kronbit.algorithms import Shampoo
from kronbit.blocking import Blocking
from kronbit.config import OPTIONS
from kronbit.first_order import BaseFactory, resolve
from kronbit.memory import held_bytes, state_bytes
from kronbit.plan import route

# How F runs, not what it holds; the meta device knows only the plain way.
_IMPLEMENTATION = ("fused", "foreach", "capturable")


def estimate_memory(
    model_or_shapes: nn.Module | Iterable[Tensor | Sequence[int]],
    *,
    base: str | BaseFactory = "adamw",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, int]:
    """Bytes that an optimizer will hold after its first step, to the byte.

    The second-order state follows from its layout; the base optimizer takes a step on the meta
    device, where tensors have shapes and no memory.

    Args:
        model_or_shapes: A module (its parameters that require a gradient), or parameters or
            shapes.
        base: The first-order optimizer, as for ``Shampoo``.
        dtype: Of the parameters, where only shapes are given.
        **options: As for ``Shampoo``, the base's options included.

    Returns:
        ``{"statistics", "roots", "base", "total"}``, as ``opt.memory()``.
    """
    if isinstance(model_or_shapes, nn.Module):
        model_or_shapes = (p for p in model_or_shapes.parameters() if p.requires_grad)
    params = []
    for item in model_or_shapes:
        own = item.dtype if isinstance(item, Tensor) else dtype
        shape = item.shape if isinstance(item, Tensor) else torch.Size(item)
        params.append(nn.Parameter(torch.empty(shape, dtype=own, device="meta")))
        params[-1].grad = torch.empty_like(params[-1])
    config = replace(Shampoo.preset, **{k: options.pop(k) for k in OPTIONS if k in options})
    for name in _IMPLEMENTATION:
        options.pop(name, None)
    first_order = resolve(params, base, options)
    if hasattr(first_order, "train"):  # schedule-free
        first_order.train()
    first_order.step()
    total = {"statistics": 0, "roots": 0, "base": held_bytes(first_order.state)}
    for p in params:
        blocking = route(p, config)
        if isinstance(blocking, Blocking):
            for kind, size in state_bytes(blocking, config, Shampoo.algorithm.p).items():
                total[kind] += size
    return {**total, "total": sum(total.values())}
