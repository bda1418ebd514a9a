"""Launches that are repeated, as CUDA graphs: the host then starts all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from kronbit.kernels.cache import BoundedCache

_REMEMBERED = 128


class Replay:
    """Work that is recorded when it comes back, and replayed from then on.

    Args:
        device: Where the work is done.
        allowed: Whether anything is recorded.

    Attributes:
        refused: Why something could not be recorded; ``None`` if nothing was refused. After that,
            nothing is tried any more.
    """

    def __init__(self, device: torch.device, allowed: bool) -> None:
        self.refused: str | None = None
        self._device, self._allowed = device, allowed and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        # What has been run; ``None`` as long as it is not recorded.
        self._graphs: BoundedCache[Hashable, torch.cuda.CUDAGraph | None] = BoundedCache(
            _REMEMBERED
        )

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do some work, which reads and writes the same places whenever it has this key.

        It must not allocate anything, nor wait for the device.
        """
        if not self._allowed:
            work()
            return
        # A graph can only hold compiled kernels: what is new is run first.
        if key in self._graphs and self._graphs[key] is None and self.refused is None:
            self._graphs[key] = self._record(work)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self._graphs.obtain(key, lambda: None)

    def forget(self) -> None:
        """Start anew: places have changed."""
        self._graphs.clear()

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        self._stream = self._stream or torch.cuda.Stream(self._device)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            # What ends a broken recording raises an error of its own.
            self.refused = str(error.__context__ or error).splitlines()[0]
            return None
        return graph
