"""Conversion of checkpoints of earlier versions.

``kronbit_format`` in every param group is the number of the format. A change of the state's layout
or of an option's meaning increments it, and adds a function to this module that converts a group
from the previous format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kronbit.config import FORMAT, FORMAT_KEY, STATISTICS_KEY


def _from_1(group: Mapping[str, Any]) -> dict[str, Any]:
    """Make the defaults of format 1 explicit: the paper's method and storage."""
    method = "dense" if group.get("bits") == 32 else "eigen"
    return {
        **group,
        "method": group.get("method") or method,
        "storage": group.get("storage", "paper"),
    }


_NEXT: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {1: _from_1}


def up_to_date(groups: Sequence[Mapping[str, Any]], has_state: bool) -> list[dict[str, Any]]:
    """Convert the param groups of a checkpoint to the current format.

    Without state, the groups may come from F alone and carry no format.

    Raises:
        ValueError: If a format is unknown, such as that of a later version.
    """
    converted = []
    for index, group in enumerate(groups):
        version = group.get(FORMAT_KEY)
        if version not in range(1, FORMAT + 1) and (version is not None or has_state):
            raise ValueError(
                f"param_groups[{index}] has {FORMAT_KEY}={version!r}; this version of kronbit "
                f"reads formats 1 to {FORMAT}: upgrade kronbit"
            )
        current = dict(group)
        if version is not None:
            for number in range(int(version), FORMAT):
                current = _NEXT[number](current)
            # Versions before K-FAC wrote the same format, but without the kind of statistics.
            current = {STATISTICS_KEY: "gradients", **current, FORMAT_KEY: FORMAT}
        converted.append(current)
    return converted
