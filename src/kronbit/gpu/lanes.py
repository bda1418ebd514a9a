"""Streams of a graph: chunks run side by side, and a wave is grafted while the next is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from kronbit.gpu.tables import LANES


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return a stream for each lane, and one for grafting; cached, since torch has few streams."""
    return [torch.cuda.Stream(device) for _ in range(LANES + 1)]


class Lanes:
    """Streams for the work of a step. Outside of a graph, all work stays in order.

    Args:
        device: Device of the work. Lanes begin after the pending work of its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: list[torch.cuda.Stream] = []
        self._grafted: list[torch.cuda.Event] = []
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._streams = _streams(device)
            self._origin = torch.cuda.current_stream(device)
            for stream in self._streams:
                stream.wait_stream(self._origin)

    def of(self, lane: int) -> AbstractContextManager[object]:
        """Return a context for work on chunks of a lane."""
        return torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()

    @contextmanager
    def grafting(self) -> Iterator[None]:
        """Run work after the pending work of all lanes."""
        if not self._streams:
            yield
            return
        *lanes, grafting = self._streams
        for lane in lanes:
            grafting.wait_stream(lane)
        with torch.cuda.stream(grafting):
            yield
        self._grafted.append(grafting.record_event())

    def wait_for_grafting(self, back: int) -> None:
        """Make the lanes wait until the wave ``back`` waves ago has been grafted."""
        if len(self._grafted) >= back:
            for lane in self._streams[:-1]:
                lane.wait_event(self._grafted[-back])

    def join(self) -> None:
        """Make the original stream wait for all lanes and for grafting."""
        for stream in self._streams:
            self._origin.wait_stream(stream)
