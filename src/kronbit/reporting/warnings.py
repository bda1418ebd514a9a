"""Warnings about state and settings that are probably a mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from kronbit.blocks.blocking import Blocking, Route
from kronbit.blocks.gradients import elements
from kronbit.messages import NamedParameter, warn
from kronbit.state.loading import Entry
from kronbit.state.validation import is_finite

_FLATTENED = 2**16  # a vector with at least this many elements is probably a flattened matrix


def warn_if_few(params: list[NamedParameter], route: Route, summary: Callable[[], str]) -> None:
    """Warn if less than half of the eligible elements are preconditioned."""
    possible = preconditioned = 0
    flat = ""
    for name, p, config in params:
        vector = sum(size > 1 for size in p.shape) < 2
        if not p.requires_grad or not config.precondition or (vector and p.numel() < _FLATTENED):
            continue
        possible += p.numel()
        preconditioned += p.numel() * isinstance(route(p, config), Blocking)
        if vector and not flat:
            flat = (
                f"{name} is a vector of {p.numel():,} elements: if DeepSpeed or FSDP 1 flattened "
                "matrices, use fully_shard (FSDP2) or DistributedDataParallel. "
            )
    if 2 * preconditioned < possible:
        warn(
            f"only {100 * preconditioned / possible:.1f} % of {possible:,} elements are "
            f"preconditioned. {flat}Set precondition=False for parameters that are left to the "
            f"base on purpose. {summary()}"
        )


def warn_after_loading(
    entries: Mapping[Tensor, Entry], params: list[NamedParameter], route: Route
) -> None:
    """Warn about state that a checkpoint lacks, and about state of F that is not finite."""
    if any(entry.blocks for entry in entries.values()):
        fresh = [
            name
            for name, p, config in params
            if p not in entries and p.requires_grad and isinstance(route(p, config), Blocking)
        ]
        if fresh:
            warn(
                f"the checkpoint has no state of {len(fresh)} preconditioned parameter(s), such as "
                f"{fresh[0]}: they start fresh"
            )
    broken = [
        entry.path("base", str(name))
        for entry in entries.values()
        for name, value in entry.base.items()
        if type(value) is Tensor and not is_finite(elements(value))
    ]
    if broken:
        warn(
            f"{len(broken)} tensor(s) of the base's state hold non-finite values, such as "
            f"{broken[0]}. The base continues from them, as it does without kronbit"
        )
    lost = [name for name, p, _ in params if p in entries and entries[p].lacks_roots()]
    if lost:
        warn(
            f"the checkpoint has no roots of {len(lost)} parameter(s), such as {lost[0]}, "
            "although their first refresh was due: they are not preconditioned until the next "
            "refresh. A full state dict of sharded parameters, as torch or a trainer saves it, "
            "has only the state that the first rank owns: save sharded state dicts "
            "(SHARDED_STATE_DICT), or use kronbit.consolidate_state_dict"
        )
