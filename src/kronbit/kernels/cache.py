"""A dict of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict of at most ``size`` values (at least 1), in which a new value evicts the oldest ones.

    If ``keep_used``, a value counts as new whenever ``obtain`` returns it, so that the least
    recently used value is evicted. ``on_eviction`` is called after an eviction.
    """

    def __init__(
        self, size: int, keep_used: bool = False, on_eviction: Callable[[], object] | None = None
    ) -> None:
        self.size, self._keep_used, self._on_eviction = size, keep_used, on_eviction

    def obtain(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key. Before a missing value is made, evict others if needed."""
        if key not in self:
            while len(self) >= max(self.size, 1):
                del self[next(iter(self))]
                if self._on_eviction is not None:
                    self._on_eviction()
            self[key] = make()
        elif self._keep_used:
            self[key] = self.pop(key)
        return self[key]
