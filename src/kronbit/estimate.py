"""An estimate of an optimizer's memory, computed without allocating it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronbit.algorithms import KFAC, Shampoo
from kronbit.base import BaseFactory, resolve, state_on_meta
from kronbit.blocks.blocking import Blocking
from kronbit.config import Config, take_options
from kronbit.optimizer import SecondOrder
from kronbit.reporting.memory import held_bytes, state_bytes
from kronbit.statistics import GradientStatistics, Statistics
from kronbit.statistics.activations import ActivationStatistics


def estimate_memory(
    model_or_shapes: nn.Module | Iterable[Tensor | tuple[str, Tensor] | Sequence[int]],
    *,
    optimizer: type[SecondOrder] = Shampoo,
    base: str | BaseFactory | None = "adamw",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, int]:
    """Return the bytes that an optimizer will hold after its first step.

    The result is exact. The size of the second-order state follows from its layout. The base
    optimizer takes a step on the meta device, where tensors have shapes but no memory. Options
    apply to all parameters. For several param groups, add up one estimate for each.

    Args:
        model_or_shapes: A module, parameters (named or not), or shapes. Parameters that do not
            require a gradient are skipped.
        optimizer: The algorithm. ``KFAC`` and ``AdaBK`` need a module.
        base: The first-order optimizer, as for ``Shampoo``; ``None`` leaves it out.
        dtype: Dtype of the parameters, if shapes are given.
        **options: Options as for ``Shampoo``, including those of the base.

    Returns:
        ``{"statistics", "roots", "base", "total"}``, as ``opt.memory()``.

    Raises:
        TypeError: If the first argument or ``optimizer`` has the wrong type.
        ValueError: If an option is invalid, or the base cannot run on the meta device.
    """
    params = list(_parameters(model_or_shapes, dtype))
    if not (isinstance(optimizer, type) and issubclass(optimizer, SecondOrder)):
        raise TypeError(f"optimizer must be Shampoo, CASPR, KFAC or AdaBK; got {optimizer!r}")
    config = take_options(options, optimizer.algorithm.options)
    total = {"statistics": 0, "roots": 0, "base": 0}
    if base is not None and params:
        total["base"] = _base_bytes(params, base, options)
    for blocking in blockings(optimizer, params, config, model_or_shapes):
        for kind, size in state_bytes(blocking, config).items():
            total[kind] += size
    return {**total, "total": sum(total.values())}


def blockings(
    optimizer: type[SecondOrder], params: Iterable[Tensor], config: Config, model: object
) -> list[Blocking]:
    """Return how an optimizer cuts the parameters that it preconditions.

    ``KFAC`` and ``AdaBK`` need a module, whose layers they watch.
    """
    statistics: Statistics = GradientStatistics()
    if issubclass(optimizer, KFAC):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{optimizer.__name__} needs layers, not shapes: pass a module")
        params = [p for p in model.parameters() if p.requires_grad]
        statistics = ActivationStatistics(model)
        statistics.adopt(params)
    routes = (statistics.route(p, config) for p in params)
    return [blocking for blocking in routes if isinstance(blocking, Blocking)]


def _base_bytes(params: list[Any], base: str | BaseFactory, options: Mapping[str, Any]) -> int:
    """Return the bytes of F's state."""
    first_order = resolve(params, base, options)
    try:
        states = state_on_meta(type(first_order), first_order.param_groups)
    except Exception as error:
        raise ValueError(
            f"base={base!r} cannot be estimated: it does not run on the meta device ({error}); "
            "base=None estimates the second-order state alone"
        ) from error
    return held_bytes(states)


def _parameters(source: Any, dtype: torch.dtype) -> Iterator[nn.Parameter]:
    """Yield the parameters to optimize, on the meta device."""
    if isinstance(source, Tensor):
        raise TypeError("got a single tensor: pass a list of parameters, or a module")
    for given in source.parameters() if isinstance(source, nn.Module) else source:
        named = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Tensor)
        item = given[1] if named else given
        if isinstance(item, Tensor):
            if item.requires_grad:
                yield nn.Parameter(torch.empty(item.shape, dtype=item.dtype, device="meta"))
        elif isinstance(item, (tuple, list)) and all(type(size) is int for size in item):
            yield nn.Parameter(torch.empty(item, dtype=dtype, device="meta"))
        else:
            raise TypeError(f"expected a module, or a list of parameters or shapes; got {given!r}")
