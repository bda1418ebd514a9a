"""One file for all ranks: the state of each put together, and taken apart again."""

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
        """The state that this rank holds."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the whole state."""


def consolidate_state_dict(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The state of all ranks as one state dict, as a single process would have it.

    All ranks that step together must call it. One parameter at a time is put together.

    Args:
        optimizer: The optimizer, with sharded parameters (FSDP2), ``shard_state=True``, or neither.

    Returns:
        On the first rank, the state dict, on the CPU; it can be saved by ``torch.save``, and loaded
        by ``kronbit.load_consolidated`` on any number of ranks, or by ``load_state_dict`` in a
        single process. On all others, an empty dict.

    Raises:
        RuntimeError: If each rank has cut its own rows.
    """
    if optimizer.config.blocks == "local" and optimizer._ranks.localises:
        raise RuntimeError(
            "blocks='local' has cut each rank's rows by themselves: there is no state dict of a "
            "single process; use torch.distributed.checkpoint, and as many ranks to load it"
        )
    owners = optimizer._ranks.owners
    own = optimizer._local_state_dict()
    state: dict[Any, dict[str, Any]] = own["state"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    first = optimizer._ranks.first
    for key, p in enumerate(params):
        if not state.get(key):  # reading optimizer.state[p] leaves an empty entry
            continue
        entry = {**state[key], "base": _whole(state[key]["base"])}
        owner = None if owners is None else owners.owner(p)
        if owners is not None and owner is not None:
            blocks = {name: leaf for name, leaf in entry.items() if name not in ("step", "base")}
            entry |= owners.link.send_to_first(_on_cpu(blocks), owner) or {}
        state[key] = _on_cpu(entry) if first else {}
    return own if first else {}


def load_consolidated(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what ``consolidate_state_dict`` returned, on any number of ranks.

    Args:
        optimizer: The optimizer.
        state_dict: The whole state dict, on every rank; ``torch.load(path, mmap=True,
            weights_only=True)`` keeps it out of memory.

    Raises:
        ValueError: If it does not fit; nothing has been changed then.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key, p in zip(keys, params, strict=False):  # the loader tells if they do not match
        if state.get(key) and is_distributed(p):
            entry = state[key]
            of_base = entry.get("base", entry)  # or it is a checkpoint of F alone
            base = tree_map_only(Tensor, partial(_like, p), dict(of_base))
            state[key] = {**entry, "base": base} if "base" in entry else base
    optimizer.load_state_dict({**state_dict, "state": state})


def _whole(base: Mapping[str, Any]) -> Any:
    """F's state with all rows. Waits for other ranks."""
    return tree_map_only(Tensor, lambda x: x.full_tensor() if is_distributed(x) else x, dict(base))


def _on_cpu(values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), values)


def _like(p: Tensor, value: Tensor) -> Tensor:
    """The rows of a tensor that this rank has of a parameter, if it is of its shape."""
    from torch.distributed.tensor import distribute_tensor

    if value.shape != p.shape or not is_distributed(p):
        return value
    whole = value.to(p.device)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
