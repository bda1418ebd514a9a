"""A dict of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """Values by key, at most ``size`` of them: a new value evicts the oldest.

    If ``keep_used``, a value counts as new whenever ``obtain`` returns it, so that the least
    recently used one is evicted. ``on_eviction`` is called after a value has been evicted.
    """

    def __init__(
        self, size: int, keep_used: bool = False, on_eviction: Callable[[], object] | None = None
    ) -> None:
        self._size, self._keep_used, self._on_eviction = size, keep_used, on_eviction

    def obtain(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key. If there is none, evict if needed, and then make it."""
        if key not in self:
            if len(self) == self._size:
                del self[next(iter(self))]
                if self._on_eviction is not None:
                    self._on_eviction()
            self[key] = make()
        elif self._keep_used:
            self[key] = self.pop(key)
        return self[key]
