"""The state of all ranks in one state dict, for one file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map_only

from kronbit.config import Config
from kronbit.distributed.ranks import Ranks
from kronbit.distributed.sharding import is_distributed


class ShardedOptimizer(Protocol):
    """The part of a second-order optimizer that consolidation needs."""

    config: Config
    param_groups: list[dict[str, Any]]

    @property
    def _ranks(self) -> Ranks:
        """The other ranks."""

    def _local_state_dict(self) -> dict[str, Any]:
        """Return the state that this rank holds."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the whole state."""


def consolidate_state_dict(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return the state of all ranks as the state dict of a single process.

    All ranks that step together must call this function. It assembles one parameter at a time.

    Args:
        optimizer: The optimizer, with sharded parameters (FSDP2), ``shard_state=True``, or neither.

    Returns:
        On the first rank, the state dict, on the CPU. It can be saved by ``torch.save``, and loaded
        by ``kronbit.load_consolidated`` on any number of ranks, or by ``load_state_dict`` in a
        single process. On all other ranks, an empty dict.

    Raises:
        RuntimeError: If each rank preconditions its rows separately (``blocks="local"``).
    """
    if optimizer.config.blocks == "local" and optimizer._ranks.localises:
        raise RuntimeError(
            "blocks='local' has cut each rank's rows separately, so no single process could load "
            "the state: use torch.distributed.checkpoint, and load with the same number of ranks"
        )
    owners = optimizer._ranks.owners
    state_dict = optimizer._local_state_dict()
    state: dict[Any, dict[str, Any]] = state_dict["state"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    first = optimizer._ranks.first
    for key, p in enumerate(params):
        if not state.get(key):  # reading optimizer.state[p] adds an empty entry
            continue
        entry = {**state[key], "base": _whole(state[key]["base"])}
        owner = None if owners is None else owners.owner_of.get(p)
        if owners is not None and owner is not None:
            blocks = {name: leaf for name, leaf in entry.items() if name not in ("step", "base")}
            entry |= owners.link.send_to_first(_on_cpu(blocks), owner) or {}
        state[key] = _on_cpu(entry) if first else {}
    return state_dict if first else {}


def load_consolidated(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the result of ``consolidate_state_dict``, on any number of ranks.

    Args:
        optimizer: The optimizer.
        state_dict: The whole state dict, on every rank. ``torch.load(path, mmap=True,
            weights_only=True)`` keeps it out of memory.

    Raises:
        ValueError: If the state dict does not fit. The optimizer is unchanged.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key, p in zip(keys, params, strict=False):  # the loader reports a mismatch
        if state.get(key) and is_distributed(p):
            entry = state[key]
            base = entry.get("base", entry)  # a checkpoint of F alone has no "base"
            base = tree_map_only(Tensor, partial(_like, p), dict(base))
            state[key] = {**entry, "base": base} if "base" in entry else base
    optimizer.load_state_dict({**state_dict, "state": state})


def _whole(base: Mapping[str, Any]) -> Any:
    """Return F's state with all rows. Waits for other ranks."""
    return tree_map_only(Tensor, lambda x: x.full_tensor() if is_distributed(x) else x, dict(base))


def _on_cpu(values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), values)


def _like(p: Tensor, value: Tensor) -> Tensor:
    """Distribute a tensor like a parameter, if it has the parameter's shape."""
    from torch.distributed.tensor import distribute_tensor

    if value.shape != p.shape or not is_distributed(p):
        return value
    value = value.to(p.device)
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
