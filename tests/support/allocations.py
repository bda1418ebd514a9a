"""A count of the memory that torch operations take, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Tracks storages made inside the ``with`` block until they are freed.

    Attributes:
        largest: Bytes of the largest storage.
        peak: The most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage(), before)
        return out

    def _see(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in before or key in self._known or storage.device.type == "meta":
            return
        size = storage.nbytes()
        self._known.add(key)
        self._alive += size
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size
