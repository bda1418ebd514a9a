"""Who does what: rows of stacks, or parameters, shared out among ranks by what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kronbit.blocks.batches import Part


def divide(parts: Iterable[Part], ranks: int) -> list[list[Part]]:
    """Share rows out among ranks. Every rank gets neighbours, and about as much as the others.

    A row costs the cube of its order. Of a part, all ranks get as many rows; those that are left
    over go to the ranks that have least so far, and of equals to another one each time.

    Args:
        parts: The rows.
        ranks: How many there are.

    Returns:
        Each rank's rows; the same on all of them.
    """
    found: list[list[Part]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    falling = sorted(parts, key=lambda part: part.factors.order, reverse=True)
    for number, part in enumerate(falling):
        each, rest = divmod(part.rows.stop - part.rows.start, ranks)
        more = set(_least(loads, number)[:rest])
        start = part.rows.start
        for rank in range(ranks):
            stop = start + each + (rank in more)
            if stop > start:
                found[rank].append(replace(part, rows=slice(start, stop)))
                loads[rank] += (stop - start) * part.factors.order**3
            start = stop
    return found


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank that does each of some things: the dearest first, each to who has least so far."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for number, i in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
        owners[i] = _least(loads, number)[0]
        loads[owners[i]] += costs[i]
    return owners


def _least(loads: Sequence[int], start: int) -> list[int]:
    """Ranks by what they have, and of equals from some rank on."""
    ranks = len(loads)
    return sorted(range(ranks), key=lambda rank: (loads[rank], (rank - start) % ranks))
