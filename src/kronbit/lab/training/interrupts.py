"""Ctrl-C and SIGTERM: the step is finished and saved before the process ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Records the first signal; the second one ends the process at once, as by default.

    Attributes:
        wanted: True after the first signal.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for kind in _SIGNALS:
                self._before[kind] = signal.signal(kind, self._note)
        return self

    def _note(self, kind: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()

    def _restore(self) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()
