"""Launches that are repeated, as CUDA graphs: the host then starts all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

_REMEMBERED = 128


class Replay:
    """Work that is recorded when it comes back, and replayed from then on.

    Args:
        device: Where the work is done.
        allowed: Whether anything is recorded.

    Attributes:
        refused: Why something could not be recorded; ``None`` if nothing was refused.
    """

    def __init__(self, device: torch.device, allowed: bool) -> None:
        self.refused: str | None = None
        self._device, self._allowed = device, allowed and device.type == "cuda"
        # Which have been run: their kernels are compiled, and a graph can only hold compiled ones.
        self._warm: set[Hashable] = set()
        # ``None`` where recording was refused.
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do some work, which reads and writes the same places whenever it has this key.

        It must not allocate anything, nor wait for the device.
        """
        # Inside of a capture of the user's, the launches become part of that.
        if not self._allowed or torch.cuda.is_current_stream_capturing():
            work()
            return
        if key in self._warm and key not in self._graphs:
            if len(self._graphs) == _REMEMBERED:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = self._record(work)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        else:
            work()
            self._warm.add(key)

    def forget(self) -> None:
        """Record anew: places have changed."""
        self._graphs.clear()

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            return None
        return graph
