"""Deterministic gradients, so that a resumed run equals an uninterrupted one bit for bit."""

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
    """Runs passes on a GPU with deterministic algorithms; on a CPU, all algorithms are.

    The setting holds during the passes only: the optimizer is deterministic without it.

    Args:
        device: Device of the passes.
        wanted: False to leave torch's settings as they are.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self._wanted = wanted and device.type == "cuda"
        if self._wanted:
            # cuBLAS needs this to be deterministic, and reads it when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def __call__(self, passes: Callable[[], T]) -> T:
        """Run passes; repeat without the setting if an operation has no deterministic algorithm."""
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
            warnings.warn(f"a resumed run will not be equal bit for bit: {reason}", stacklevel=2)
            return passes()


@contextmanager
def _deterministic() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # it takes time, and no result depends on it
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
