"""The bounded cache evicts as ``functools.lru_cache`` does, or in the order of insertion."""

from __future__ import annotations

import random
from collections import deque
from functools import lru_cache

from kronbit.kernels.cache import BoundedCache

KEYS = random.Random(0).choices(range(6), k=300)


def test_keep_used_evicts_as_lru_cache() -> None:
    evictions: list[int] = []
    cache: BoundedCache[int, str] = BoundedCache(3, keep_used=True, on_eviction=evictions.pop)
    reference = lru_cache(3)(str)
    made = 0
    for key in KEYS:
        evictions.append(key)
        misses = reference.cache_info().misses
        assert cache.obtain(key, lambda key=key: str(key)) == reference(key)
        missed = reference.cache_info().misses > misses
        assert (not evictions) == (missed and made >= 3)
        evictions.clear()
        made += missed
        assert len(cache) == reference.cache_info().currsize


def test_values_are_evicted_in_the_order_of_insertion() -> None:
    cache: BoundedCache[int, int] = BoundedCache(3)
    reference: deque[int] = deque(maxlen=3)
    for key in KEYS:
        if key not in reference:
            reference.append(key)
        cache.obtain(key, int)
        assert list(cache) == list(reference)


def test_the_size_may_change() -> None:
    cache: BoundedCache[int, int] = BoundedCache(0)
    for size, keys in ((0, [1]), (3, [1, 2, 3]), (2, [3, 4])):
        cache.size = size
        for key in keys:
            cache.obtain(key, int)
        assert list(cache) == keys
