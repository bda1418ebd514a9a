"""Count the memory that torch operations allocate, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Track storages allocated inside the ``with`` block until they are freed.

    Attributes:
        largest: The size of the largest storage, in bytes.
        peak: The largest number of bytes alive at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self._alive = 0
        self._tracked: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._track(leaf.untyped_storage(), inputs)
        return out

    def _track(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in inputs or key in self._tracked or storage.device.type == "meta":
            return
        size = storage.nbytes()
        self._tracked.add(key)
        self._alive += size
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._tracked.discard(key)
        self._alive -= size
