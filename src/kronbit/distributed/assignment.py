"""Division of rows of stacks, or of parameters, among ranks by cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kronbit.blocks.batches import Part


def divide(parts: Iterable[Part], ranks: int) -> list[list[Part]]:
    """Divide rows among ranks. Each rank gets adjacent rows, and about the same load.

    A row costs the cube of its order. Each rank gets the same number of rows of a part; remaining
    rows go to the ranks with the smallest loads, and ties start at a different rank each time.
    Returns the rows of each rank; the result is the same on all ranks.
    """
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    largest_first = sorted(parts, key=lambda part: part.factors.order, reverse=True)
    for number, part in enumerate(largest_first):
        rows_per_rank, remaining = divmod(part.rows.stop - part.rows.start, ranks)
        with_one_more = set(_by_load(loads, number)[:remaining])
        start = part.rows.start
        for rank in range(ranks):
            stop = start + rows_per_rank + (rank in with_one_more)
            if stop > start:
                shares[rank].append(replace(part, rows=slice(start, stop)))
                loads[rank] += (stop - start) * part.factors.order**3
            start = stop
    return shares


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each item: the one with the smallest load, most expensive items first."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for number, i in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
        owners[i] = _by_load(loads, number)[0]
        loads[owners[i]] += costs[i]
    return owners


def _by_load(loads: Sequence[int], start: int) -> list[int]:
    """Return the ranks, sorted by load. Ties are in order of rank, from ``start`` on."""
    ranks = len(loads)
    return sorted(range(ranks), key=lambda rank: (loads[rank], (rank - start) % ranks))
