"""The bounded cache evicts as ``functools.lru_cache`` does, or in the order of insertion."""

from __future__ import annotations

import random
from collections import deque
from functools import lru_cache, partial

from kronbit.kernels.cache import BoundedCache

KEYS = random.Random(0).choices(range(6), k=300)


def test_keep_used_evicts_as_lru_cache() -> None:
    made: list[int] = []
    expected: list[int] = []
    evictions: list[int] = []
    cache: BoundedCache[int, None] = BoundedCache(
        3, keep_used=True, on_eviction=lambda: evictions.append(0)
    )
    reference = lru_cache(3)(expected.append)
    for key in KEYS:
        cache.obtain(key, partial(made.append, key))
        reference(key)
        assert made == expected
        assert len(evictions) == max(0, len(made) - 3)
        assert len(cache) == reference.cache_info().currsize


def test_values_are_evicted_in_the_order_of_insertion() -> None:
    cache: BoundedCache[int, str] = BoundedCache(3)
    reference: deque[int] = deque(maxlen=3)
    for number, key in enumerate(KEYS):
        new = key not in reference
        if new:
            reference.append(key)
        value = cache.obtain(key, lambda number=number: f"made at {number}")
        assert (value == f"made at {number}") == new
        assert list(cache) == list(reference)


def test_the_size_may_change() -> None:
    cache: BoundedCache[int, int] = BoundedCache(1)
    for size, keys in ((0, [1]), (3, [1, 2, 3]), (2, [3, 4])):
        cache.size = size
        for key in keys:
            cache.obtain(key, int)
        assert list(cache) == keys
