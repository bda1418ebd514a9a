"""The terminal during training: a progress bar or a line per evaluation, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


class Terminal:
    """Shows the progress of one run, or of several in sequence, and handles Ctrl-C and SIGTERM.

    The first signal sets ``interrupted``: the step is finished and saved before the process ends.
    The second one ends the process at once, as by default. A quiet console shows nothing, as on all
    ranks but the first.
    """

    def __init__(self, console: Console) -> None:
        self.interrupted = False
        self._console, self._live = console, console.is_terminal and not console.quiet
        self._handlers: dict[signal.Signals, Any] = {}
        width = console.width
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None if width >= 70 else 10),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}", markup=False),
        ]
        if width >= 90:
            columns += [TextColumn("ETA"), TimeRemainingColumn(compact=True)]
        self._bar = Progress(*columns, console=console, disable=not self._live, expand=width >= 70)

    def __enter__(self) -> Terminal:
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGINT, signal.SIGTERM):
                self._handlers[kind] = signal.signal(kind, self._interrupt)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:  # old versions of rich print a line even if the bar is disabled
            self._bar.stop()
        self._restore_handlers()

    def _interrupt(self, *_: object) -> None:
        self.interrupted = True
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for kind, handler in self._handlers.items():
            signal.signal(kind, handler)

    def begin(self, label: str, step: int, steps: int) -> None:
        """Show a run that starts or resumes at ``step``."""
        self._label, self._steps = label, steps
        room = max(8, self._console.width // 4)
        name = label if len(label) <= room else label[: room - 1] + "…"
        self._task = self._bar.add_task(name, total=steps, completed=step, figures="loss ...")

    def step(self, step: int) -> None:
        """Show that a step was launched."""
        self._bar.update(self._task, completed=step)

    def figures(self, loss: float, lr: float, rate: float, memory: int | None) -> None:
        """Show the loss, and in wide terminals learning rate, speed and memory."""
        parts = {0: f"loss {loss:.4g}", 80: f"lr {lr:.3g}", 100: f"{rate:.3g} it/s"}
        if memory is not None:
            parts[115] = f"{memory / 2**20:,.0f} MiB"
        shown = [part for width, part in parts.items() if self._console.width >= width]
        self._bar.update(self._task, figures="  ".join(shown))

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Print held-out figures, unless a progress bar is shown."""
        if not self._live:
            text = f"{self._label}: step {step}/{self._steps}, held-out loss {figures['loss']:.4f}"
            if "accuracy" in figures:
                text += f", accuracy {100 * figures['accuracy']:.2f} %"
            self.message(text)

    def message(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
