"""What earlier formats of checkpoints meant: they are brought up to date here, and nowhere else.

``kronbit_format`` in every param group is the number of the format. A change of what the state
holds, or of what an option means, takes the next number, and a function below that makes a group of
the one before into one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kronbit.config import FORMAT, FORMAT_KEY, STATISTICS_KEY


def _from_1(group: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's method was the default, and there was one storage at first."""
    method = "dense" if group.get("bits") == 32 else "eigen"
    return {
        **group,
        "method": group.get("method") or method,
        "storage": group.get("storage", "paper"),
    }


_NEXT: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {1: _from_1}


def up_to_date(groups: Sequence[Mapping[str, Any]], has_state: bool) -> list[dict[str, Any]]:
    """Param groups of a checkpoint of any format as they would be written today.

    Args:
        groups: As they were written.
        has_state: Whether there is state beside them; without, they may be those of F alone.

    Raises:
        ValueError: If a format is unknown, since it is a later one.
    """
    found = []
    for index, group in enumerate(groups):
        version = group.get(FORMAT_KEY)
        if version not in range(1, FORMAT + 1) and (version is not None or has_state):
            raise ValueError(
                f"param_groups[{index}] has {FORMAT_KEY}={version!r}; this version of kronbit "
                f"reads formats 1 to {FORMAT}: upgrade kronbit"
            )
        now = dict(group)
        if version is not None:
            for number in range(int(version), FORMAT):
                now = _NEXT[number](now)
            # Before K-FAC there was nothing to be said, and no number was taken for it.
            now = {STATISTICS_KEY: "gradients", **now, FORMAT_KEY: FORMAT}
        found.append(now)
    return found
