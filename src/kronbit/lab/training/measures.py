"""Time of each step and peak memory, measured without waiting for the device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import time
from pathlib import Path
from typing import Any

import torch

import kronbit


class StepTimer:
    """Measures milliseconds between marks; on a GPU with events, which are read later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[Any, Any, float]] = []  # start, end, milliseconds to exclude
        self.restart()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """Mark the end of a step."""
        start, skipped = self._last, self._skipped
        self.restart()
        self._steps.append((start, self._last, skipped))

    def restart(self) -> None:
        """Start the next step now; the time since the last mark is not counted."""
        self._last, self._skipped = self._now(), 0.0

    def skip(self, seconds: float) -> None:
        """Exclude a duration from the current step."""
        self._skipped += 1e3 * seconds

    def gather(self) -> list[float]:
        """Return the times since the last call. The device must have finished these steps."""
        on_gpu = self._device.type == "cuda"
        times = [
            round((a.elapsed_time(b) if on_gpu else 1e3 * (b - a)) - skipped, 3)
            for a, b, skipped in self._steps
        ]
        self._steps.clear()
        return times


class PeakMemory:
    """Peak memory of a training run.

    On a GPU it is the peak of allocated bytes, with the memory of a CUDA graph. On a CPU it is the
    growth of the process. Evaluation between ``note`` and ``restart`` does not count.

    Args:
        device: Device of the run.
        held: Bytes of parameters, which are allocated already.
        earlier: Bytes that were allocated before the run; see ``allocated_earlier``.
    """

    def __init__(self, device: torch.device, held: int, earlier: int = 0) -> None:
        self._device, self._held, self._beside, self._start = device, held, -earlier, 0
        self.bytes: int | None = None  # the peak, if the system reports it
        self.kind = "allocated on the GPU"
        gc.collect()
        if device.type != "cuda":
            self.kind = "parameters, and growth of the process in training"
            with contextlib.suppress(OSError, AttributeError):
                # Free memory goes back to the system, so that its reuse counts as growth.
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            self._start = _resident("VmRSS") or 0
        self.restart()

    def note(self) -> None:
        """Include the peak since the last ``restart``."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) + self._beside
        elif self._counts:
            peak = self._held + max(0, (_resident("VmHWM") or 0) - self._start)
        else:
            return
        self.bytes = max(peak, self.bytes or 0)

    def restart(self) -> None:
        """Start a new measurement. ``bytes`` keeps the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._counts = False
        with contextlib.suppress(OSError):
            # Linux resets the peak to the current size.
            Path("/proc/self/clear_refs").write_text("5")
            self._counts = bool(self._start)

    def add_beside(self, value: int) -> None:
        """Add bytes of a CUDA graph, which torch does not count as allocated."""
        self._beside += value
        self.kind = "allocated on the GPU, and kept by a CUDA graph"
        self.restart()

    def now(self) -> int | None:
        """Return the current memory in bytes, for the progress bar."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) + self._beside
        return _resident("VmRSS")


def allocated_earlier(device: torch.device) -> int:
    """Return the GPU memory of earlier runs of this process, such as workspaces of cuBLAS."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _line(path: Path, name: str) -> str | None:
    """Return the value of a line ``name: value``; ``None`` if the file or the line is missing."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None


def _resident(name: str) -> int | None:
    line = _line(Path("/proc/self/status"), name)
    return None if line is None else 1024 * int(line.split()[0])


def hardware(device: torch.device) -> str:
    """Return the name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    """Return the versions of kronbit, Python, torch and CUDA."""
    return {
        "kronbit": kronbit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
