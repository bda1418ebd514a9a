"""The same gradients every time, so that a run that is resumed is the one that was stopped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kronbit.lab.errors import one_line

T = TypeVar("T")


class Repeatable:
    """Runs passes on a GPU with deterministic algorithms. A CPU has no others.

    The optimizer is repeatable by itself and needs none of this, so nothing is changed outside.

    Args:
        device: Where they run.
        wanted: Whether to.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self._wanted = wanted and device.type == "cuda"
        if self._wanted:
            # cuBLAS may choose by chance without it; read when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def __call__(self, passes: Callable[[], T]) -> T:
        """Call a function, again without them if an operation has no such algorithm."""
        if not self._wanted:
            return passes()
        try:
            with _deterministic():
                return passes()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            self._wanted = False
            reason = one_line(error).split(". ")[0]
            warnings.warn(f"a resumed run will not be the same to the bit: {reason}", stacklevel=2)
            return passes()


@contextmanager
def _deterministic() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # that would cost time and tell nothing
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
