"""Warnings about states and settings that a user probably did not intend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kronbit.blocks.blocking import Blocking
from kronbit.config import Config
from kronbit.messages import warn
from kronbit.reporting.summary import Row
from kronbit.state.loading import Entry

_FLATTENED = 2**16  # a vector with at least this many elements is probably a flattened matrix


def warn_of_fresh_starts(
    params: Sequence[Row], route: Callable[[Tensor, Config], Blocking | str]
) -> None:
    """Warn about preconditioned parameters that have no state yet."""
    fresh = [
        name
        for name, p, config in params
        if p.requires_grad and isinstance(route(p, config), Blocking)
    ]
    if fresh:
        warn(
            f"the checkpoint has no state of {len(fresh)} preconditioned parameter(s), such as "
            f"{fresh[0]}: they start fresh"
        )


def warn_of_lost_roots(names: Sequence[str]) -> None:
    """Warn about refreshed parameters whose roots are missing in the checkpoint."""
    if names:
        warn(
            f"the checkpoint has no roots of {len(names)} parameter(s), such as {names[0]}, "
            "although their first refresh is past: they are not preconditioned until the next one. "
            "A full state dict of sharded parameters, by torch or by a trainer, has only the state "
            "that the first rank owns: save sharded ones (SHARDED_STATE_DICT), or use "
            "kronbit.consolidate_state_dict"
        )


def warn_of_few(
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
    summary: Callable[[], str],
) -> None:
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
                f"{name} is a vector of {p.numel():,}: if DeepSpeed or FSDP 1 has flattened "
                "matrices, use fully_shard (FSDP2) or DistributedDataParallel. "
            )
    if 2 * preconditioned < possible:
        warn(
            f"only {100 * preconditioned / possible:.1f} % of {possible:,} elements are "
            f"preconditioned. {flat}Set precondition=False for parameters that are left to the "
            f"base on purpose. {summary()}"
        )


def warn_after_loading(
    entries: Mapping[Tensor, Entry],
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
) -> None:
    """Warn about preconditioned parameters whose statistics or roots are not in the checkpoint."""
    if any(entry.blocks for entry in entries.values()):
        warn_of_fresh_starts([row for row in params if row[1] not in entries], route)
    lost = {p for p, entry in entries.items() if entry.lacks_roots()}
    warn_of_lost_roots([name for name, p, _ in params if p in lost])
