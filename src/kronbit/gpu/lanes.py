"""The streams of a graph: chunks fill each other's gaps, and a wave is grafted beside the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from kronbit.gpu.tables import LANES


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """One for each lane, and one for grafting: always the same, since torch has few to give."""
    return [torch.cuda.Stream(device) for _ in range(LANES + 1)]


class Lanes:
    """Where the work of a step goes. Outside of a graph, all of it stays in order.

    Args:
        device: Where the work is done. Lanes begin after what its current stream has got so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: list[torch.cuda.Stream] = []
        self._grafted: list[torch.cuda.Event] = []
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._streams = _streams(device)
            self._here = torch.cuda.current_stream(device)
            for stream in self._streams:
                stream.wait_stream(self._here)

    def of(self, lane: int) -> AbstractContextManager[object]:
        """For work on chunks of a lane."""
        return torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()

    @contextmanager
    def grafting(self) -> Iterator[None]:
        """For what comes after all that lanes have got so far."""
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
        """Let the lanes go on only after the grafting of the wave that came ``back`` waves ago."""
        if len(self._grafted) >= back:
            for lane in self._streams[:-1]:
                lane.wait_event(self._grafted[-back])

    def join(self) -> None:
        """Let the stream that began go on only after all of this."""
        for stream in self._streams:
            self._here.wait_stream(stream)
