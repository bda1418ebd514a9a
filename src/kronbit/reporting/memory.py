"""Exact accounting of the state: bytes in use, and bytes that a layout will need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kronbit.blocks.blocking import Blocking
from kronbit.config import Config
from kronbit.distributed.sharding import local
from kronbit.factors import is_root, make_method
from kronbit.state.binding import blocks_of


def account(state: Mapping[Tensor, Mapping[str, Any]], base: Mapping[Any, Any]) -> dict[str, int]:
    """Return the bytes held by a second-order optimizer's state and F's state, by kind."""
    total = {"statistics": 0, "roots": 0, "base": held_bytes(base)}
    blocks = (block for entry in state.values() for block in blocks_of(entry).values())
    for leaves in (side for block in blocks for side in block.values()):
        for name, tensor in leaves.items():
            total[_kind(name)] += _tensor_bytes(tensor)
    return {**total, "total": sum(total.values())}


def state_bytes(blocking: Blocking, config: Config) -> dict[str, int]:
    """Return the bytes of a parameter's statistics and roots, from the layout alone."""
    total = {"statistics": 0, "roots": 0}
    for grid in blocking.grids:
        for order in grid.shape:
            layout = make_method(config.format(order)).layout(order)
            for name, (shape, dtype) in layout.items():
                total[_kind(name)] += len(grid) * math.prod(shape) * dtype.itemsize
    return total


def held_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists. Shared tensors count once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
    return sum(map(_tensor_bytes, tensors.values()))


def _kind(name: str) -> str:
    return "roots" if is_root(name) else "statistics"


def _tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank. A tensor subclass counts as its inner tensors."""
    tensor = local(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
