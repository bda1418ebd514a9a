"""Time of each step, and peak memory: measured without waiting for the device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import time
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class StepTimer:
    """Milliseconds from one mark to the next; on a GPU by events, which are read later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[Any, Any, float]] = []  # both marks, and what to leave out
        self._last, self._skipped = self._now(), 0.0

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """A step is over."""
        now = self._now()
        self._steps.append((self._last, now, self._skipped))
        self._last, self._skipped = now, 0.0

    def restart(self) -> None:
        """Something else than a step has taken time; the next one begins now."""
        self._last, self._skipped = self._now(), 0.0

    def skip(self, seconds: float) -> None:
        """Something within a step is no part of it."""
        self._skipped += 1e3 * seconds

    def gather(self) -> list[float]:
        """The steps since the last call. The device must be done with them."""
        on_gpu = self._device.type == "cuda"
        times = [
            round((a.elapsed_time(b) if on_gpu else 1e3 * (b - a)) - skipped, 3)
            for a, b, skipped in self._steps
        ]
        self._steps.clear()
        return times


class PeakMemory:
    """The most that training took.

    On a GPU it is what was allocated, and what a CUDA graph keeps, else what the process grew by.
    Evaluation between ``note`` and ``restart`` does not count.

    Args:
        device: Where training takes place.
        held: Bytes of parameters, which are there already.
        earlier: Bytes that were allocated before the run; see ``allocated_earlier``.

    Attributes:
        kind: What the figure means.
    """

    def __init__(self, device: torch.device, held: int, earlier: int = 0) -> None:
        self._device, self._held = device, held
        self._beside = -earlier
        self._peak: int | None = None
        self._start = 0
        gc.collect()
        if device.type == "cuda":
            self.kind = "allocated on the GPU"
        else:
            self.kind = "parameters, and what the process grew by in training"
            _give_back_free_memory()
            self._start = _resident("VmRSS") or 0
        self.restart()

    def note(self) -> None:
        """Take what the last steps needed into account."""
        if self._device.type == "cuda":
            self.raise_to(torch.cuda.max_memory_allocated(self._device) + self._beside)
        elif self._counts:
            self.raise_to(self._held + max(0, (_resident("VmHWM") or 0) - self._start))

    def restart(self) -> None:
        """Count from now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._counts = False
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # Linux: the peak is what is held now
            self._counts = bool(self._start)

    def add_beside(self, value: int) -> None:
        """From now on so much is taken that does not count as allocated: by a CUDA graph."""
        self._beside += value
        self.kind = "allocated on the GPU, and kept by a CUDA graph"
        self.restart()

    def raise_to(self, value: int) -> None:
        """Another part of the same run has needed so much."""
        self._peak = max(value, self._peak or 0)

    def read(self) -> int | None:
        """Bytes; ``None`` where it cannot be told."""
        return self._peak

    def now(self) -> int | None:
        """Bytes held at present, for the progress bar."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) + self._beside
        return _resident("VmRSS")


def allocated_earlier(device: torch.device) -> int:
    """What earlier runs of this process still have on a GPU: workspaces of cuBLAS, above all."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _line(path: Path, name: str) -> str | None:
    """The value of a line ``name: value`` of a file of Linux."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None


def _resident(name: str) -> int | None:
    line = _line(_STATUS, name)
    return None if line is None else 1024 * int(line.split()[0])


def _give_back_free_memory() -> None:
    """What an earlier run has freed must not count for nothing in this one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def hardware(device: torch.device) -> str:
    """What it runs on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    """What a figure must be quoted with."""
    import kronbit

    return {
        "kronbit": kronbit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
