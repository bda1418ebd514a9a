"""Inject faults: out-of-memory errors and Ctrl-C."""

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
    """Raise an out-of-memory error at the nth operation.

    Args:
        nth: Number of the operation, from 1; -1 only counts operations.
        name: Count only operations whose name contains this text.
        lasting: Also fail all later operations that allocate memory.
    """

    def __init__(self, nth: int = -1, name: str = "", lasting: bool = False) -> None:
        super().__init__()
        self.count, self._nth, self._name, self._lasting = 0, nth, name, lasting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = not func.is_view and self._name in str(func)  # a view allocates nothing
        self.count += counts
        allocates = counts and not func._schema.is_mutable
        still_failing = self._lasting and allocates and 0 < self._nth <= self.count
        if still_failing or (counts and self.count == self._nth):
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 MiB.")
        return func(*args, **(kwargs or {}))


@contextmanager
def interrupted_at(nth: int, where: str = SOURCES) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the nth executed line of certain sources.

    Args:
        nth: Number of the line, from 1; 0 only counts lines.
        where: Path prefix of the sources; by default kronbit.

    Yields:
        A list with one element, the number of lines executed so far.
    """
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(where):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == nth:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(previous)
