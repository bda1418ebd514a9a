"""CUDA graphs of launches that are repeated: the host starts all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from kronbit.kernels.cache import BoundedCache

_REMEMBERED = 128


class Replay:
    """Records work when it is repeated, and replays it from then on.

    Args:
        device: Device of the work.
        allowed: True if work may be recorded.

    Attributes:
        refused: Why work could not be recorded; ``None`` if none was refused. After a refusal,
            nothing is recorded.
    """

    def __init__(self, device: torch.device, allowed: bool) -> None:
        self.refused: str | None = None
        self._device, self._allowed = device, allowed and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        # By key, the graph of work that has been run once; ``None`` until it is recorded.
        self._graphs: BoundedCache[Hashable, torch.cuda.CUDAGraph | None] = BoundedCache(
            _REMEMBERED
        )

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do work that reads and writes the same addresses whenever it has this key.

        The work must not allocate memory, nor wait for the device.
        """
        if not self._allowed:
            work()
            return
        # A graph can only hold compiled kernels: new work is run first.
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
