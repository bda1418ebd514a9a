"""CUDA graphs of repeated launches: the host starts all launches of a graph at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from kronbit.kernels.cache import BoundedCache

_CACHE_SIZE = 128


class Replay:
    """Records work when it is repeated, and replays it from then on.

    Args:
        device: Device of the work.
        allowed: True if work may be recorded.

    Attributes:
        refused: Why work could not be recorded; ``None`` if no recording was refused. After a
            refusal, nothing more is recorded.
    """

    def __init__(self, device: torch.device, allowed: bool) -> None:
        self.refused: str | None = None
        self._device, self._allowed = device, allowed and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        # By key, the graph of work that has been run once; ``None`` until it is recorded.
        self._graphs: BoundedCache[Hashable, torch.cuda.CUDAGraph | None] = BoundedCache(
            _CACHE_SIZE
        )

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run work that uses the same addresses in all calls with the same key.

        The work must not allocate memory, nor wait for the device.
        """
        if not self._allowed:
            work()
            return
        # A graph can only hold compiled kernels, so new work runs once before it is recorded.
        if key in self._graphs and self._graphs[key] is None and self.refused is None:
            self._graphs[key] = self._record(work)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self._graphs.obtain(key, lambda: None)

    def forget(self) -> None:
        """Drop all graphs: addresses have changed."""
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
            # Ending a failed capture raises another error.
            self.refused = str(error.__context__ or error).splitlines()[0]
            return None
        return graph
