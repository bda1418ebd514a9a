"""Faults that tests bring about: want of memory, and Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kronbit

SOURCES = str(Path(kronbit.__file__).parent)


class NthOperation(TorchDispatchMode):
    """Raises in the place of the nth operation, or of the nth of a name; -1: counts them only.

    With ``lasting``, everything that takes memory fails from then on.
    """

    def __init__(self, nth: int = -1, name: str = "", lasting: bool = False) -> None:
        super().__init__()
        self.count, self._nth, self._name, self._lasting = 0, nth, name, lasting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = not func.is_view and self._name in str(func)  # a view needs no memory
        self.count += counts
        takes_memory = counts and not func._schema.is_mutable
        lasts = self._lasting and takes_memory and 0 < self._nth <= self.count
        if lasts or (counts and self.count == self._nth):
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 MiB.")
        return func(*args, **(kwargs or {}))


@contextmanager
def interrupted_at(nth: int, where: str = SOURCES) -> Iterator[list[int]]:
    """Ctrl-C at the nth line of ours, or of other sources; 0: counts them only."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(where):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == nth:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
