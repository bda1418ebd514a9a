"""Display of a training: a progress bar in a terminal, a line per evaluation elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_REDRAWN_EVERY = 0.1  # seconds


class _Figures(ProgressColumn):
    """Loss, and in wide terminals learning rate, speed and memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def render(self, task: Task) -> Text:
        figures, width = task.fields, self._width
        if not figures:
            return Text("loss ...")
        parts = [f"loss {figures['loss']:.4g}"]
        if width >= 80:
            parts.append(f"lr {figures['lr']:.3g}")
        if width >= 100:
            parts.append(f"{figures['rate']:.3g} it/s")
        if width >= 115 and figures["memory"] is not None:
            parts.append(f"{figures['memory'] / 2**20:,.0f} MiB")
        return Text("  ".join(parts))


class Display:
    """Shows the progress of one training, or of several in sequence.

    Args:
        console: The console to print to.
        wanted: False to show nothing, as on all ranks but the first.
    """

    def __init__(self, console: Console, wanted: bool = True) -> None:
        self._console, self._wanted = console, wanted
        self._live = wanted and console.is_terminal
        self._progress: Progress | None = None
        self._label, self._steps = "", 0
        self._drawn = 0.0

    def __enter__(self) -> Display:
        if self._live:
            width = self._console.width
            columns: list[ProgressColumn] = [
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None if width >= 70 else 10),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                _Figures(width),
            ]
            if width >= 90:
                columns += [TextColumn("ETA"), TimeRemainingColumn(compact=True)]
            self._progress = Progress(*columns, console=self._console, expand=width >= 70)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, label: str, step: int, steps: int) -> None:
        """Show a training that starts or resumes at ``step``."""
        self._label, self._steps = label, steps
        if self._progress is not None:
            room = max(8, self._console.width // 4)
            name = label if len(label) <= room else label[: room - 1] + "…"
            self._task = self._progress.add_task(name, total=steps, completed=step)

    def step(self, step: int) -> None:
        """Show that a step was launched."""
        now = time.monotonic()
        if self._progress is not None and now - self._drawn > _REDRAWN_EVERY:
            self._drawn = now
            self._progress.update(self._task, completed=step)

    def figures(self, step: int, loss: float, lr: float, rate: float, memory: int | None) -> None:
        """Show figures that were read from the device."""
        if self._progress is not None:
            self._progress.update(
                self._task, completed=step, loss=loss, lr=lr, rate=rate, memory=memory
            )

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Print held-out figures, unless a progress bar is shown."""
        if self._wanted and not self._live:
            accuracy = figures.get("accuracy")
            extra = "" if accuracy is None else f", accuracy {100 * accuracy:.2f} %"
            self.message(
                f"{self._label}: step {step}/{self._steps}, held-out loss {figures['loss']:.4f}"
                f"{extra}"
            )

    def message(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._wanted:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
