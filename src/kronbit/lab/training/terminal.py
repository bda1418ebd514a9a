"""The user's side of a training: a progress bar, or a line per evaluation, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


class Terminal:
    """Shows the progress of one training, or of several in sequence, and hears Ctrl-C and SIGTERM.

    The first signal is recorded: the step is finished and saved before the process ends. The second
    one ends the process at once, as by default.

    Args:
        console: The console to print to; a quiet one shows nothing, as on all ranks but the first.

    Attributes:
        interrupted: True after the first signal.
    """

    def __init__(self, console: Console) -> None:
        self.interrupted = False
        self._console = console
        self._progress: Progress | None = None
        self._label, self._steps = "", 0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Terminal:
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGINT, signal.SIGTERM):
                self._handlers[kind] = signal.signal(kind, self._interrupt)
        if self._console.is_terminal and not self._console.quiet:
            width = self._console.width
            columns: list[ProgressColumn] = [
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None if width >= 70 else 10),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[figures]}", markup=False),
            ]
            if width >= 90:
                columns += [TextColumn("ETA"), TimeRemainingColumn(compact=True)]
            self._progress = Progress(*columns, console=self._console, expand=width >= 70)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._restore_handlers()

    def _interrupt(self, *_: object) -> None:
        self.interrupted = True
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for kind, handler in self._handlers.items():
            signal.signal(kind, handler)

    def begin(self, label: str, step: int, steps: int) -> None:
        """Show a training that starts or resumes at ``step``."""
        self._label, self._steps = label, steps
        if self._progress is not None:
            room = max(8, self._console.width // 4)
            name = label if len(label) <= room else label[: room - 1] + "…"
            self._task = self._progress.add_task(
                name, total=steps, completed=step, figures="loss ..."
            )

    def step(self, step: int) -> None:
        """Show that a step was launched."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def figures(self, loss: float, lr: float, rate: float, memory: int | None) -> None:
        """Show the loss, and in wide terminals learning rate, speed and memory."""
        if self._progress is not None:
            parts = [(0, f"loss {loss:.4g}"), (80, f"lr {lr:.3g}"), (100, f"{rate:.3g} it/s")]
            if memory is not None:
                parts.append((115, f"{memory / 2**20:,.0f} MiB"))
            shown = [text for width, text in parts if self._console.width >= width]
            self._progress.update(self._task, figures="  ".join(shown))

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Print held-out figures, unless a progress bar is shown."""
        if self._progress is None:
            text = f"{self._label}: step {step}/{self._steps}, held-out loss {figures['loss']:.4f}"
            if "accuracy" in figures:
                text += f", accuracy {100 * figures['accuracy']:.2f} %"
            self.message(text)

    def message(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
