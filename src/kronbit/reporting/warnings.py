"""Warnings about what a user probably did not intend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kronbit.blocks.blocking import Blocking
from kronbit.config import Config
from kronbit.messages import warn
from kronbit.reporting.summary import Row
from kronbit.state.loading import Entry


def warn_of_fresh_starts(
    params: Sequence[Row], route: Callable[[Tensor, Config], Blocking | str]
) -> None:
    """Warn of parameters without state that will be preconditioned."""
    fresh = [
        name for name, p, own in params if p.requires_grad and isinstance(route(p, own), Blocking)
    ]
    if fresh:
        warn(
            f"the checkpoint has no state of {len(fresh)} preconditioned parameter(s), such as "
            f"{fresh[0]}: they start fresh"
        )


def warn_of_lost_roots(names: Sequence[str]) -> None:
    """Warn of parameters that should be preconditioned by now, but in the checkpoint are not."""
    if names:
        warn(
            f"the checkpoint has no roots of {len(names)} parameter(s), such as {names[0]}, "
            "although their first refresh should be past: they go on as before it. A full state "
            "dict of sharded parameters, by torch or by a trainer, keeps only what the first rank "
            "owns: save sharded ones (SHARDED_STATE_DICT), or by kronbit.consolidate_state_dict"
        )


def warn_of_few(
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
    summary: Callable[[], str],
) -> None:
    """Warn if less than half of what could be preconditioned is: flattened matrices, say."""
    possible = preconditioned = 0
    flat = ""
    for name, p, own in params:
        vector = sum(size > 1 for size in p.shape) < 2
        if not p.requires_grad or not own.precondition or (vector and p.numel() < _FLATTENED):
            continue
        possible += p.numel()
        preconditioned += p.numel() * isinstance(route(p, own), Blocking)
        if vector and not flat:
            flat = (
                f"{name} is a vector of {p.numel():,}: if DeepSpeed or FSDP 1 has flattened "
                "matrices, use fully_shard (FSDP2) or DistributedDataParallel. "
            )
    if 2 * preconditioned < possible:
        warn(
            f"only {100 * preconditioned / possible:.1f} % of {possible:,} elements are "
            f"preconditioned. {flat}precondition=False says what is meant to be left to the base. "
            f"{summary()}"
        )


_FLATTENED = 2**16  # elements of a vector that must have been matrices


def warn_after_loading(
    entries: Mapping[Tensor, Entry],
    params: Sequence[Row],
    route: Callable[[Tensor, Config], Blocking | str],
) -> None:
    """Warn of preconditioned parameters whose statistics or roots are not in the checkpoint."""
    if any(entry.blocks for entry in entries.values()):
        warn_of_fresh_starts([row for row in params if row[1] not in entries], route)
    lost = {p for p, entry in entries.items() if entry.lacks_roots()}
    warn_of_lost_roots([name for name, p, _ in params if p in lost])
