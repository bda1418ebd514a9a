"""Train runs as parallel processes, stop them in time, and report their progress."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from trainings import PlannedRun

_OUTCOMES = {0: "finished", 130: "stopped"}  # by exit code
_TAIL = 2000  # characters of a failed run's log

# A function that returns the runs to start now, given the running ones and the seconds left.
Choice: TypeAlias = Callable[[Sequence[PlannedRun], float], Sequence[PlannedRun]]


@dataclass(frozen=True)
class RunFolders:
    """The folders of runs on this machine.

    Attributes:
        out: Their common parent.
    """

    out: Path

    def folder(self, run: PlannedRun) -> Path:
        """Return the folder of a run."""
        return self.out / run.path

    def log(self, run: PlannedRun) -> Path:
        """Return the file with the output of a run."""
        return self.out / f"{run.path}.log"

    def is_finished(self, run: PlannedRun) -> bool:
        """True if a run has finished on this machine."""
        return (self.folder(run) / "summary.json").is_file()

    def is_running(self, run: PlannedRun) -> bool:
        """True if a process is training the run."""
        try:
            os.kill(int(self.process_file(run).read_text()), 0)
        except (OSError, ValueError):
            return False
        return True

    def process_file(self, run: PlannedRun) -> Path:
        """Return the file with the process ID of a run; it exists while the run is active."""
        return self.out / f"{run.path}.pid"

    def saved_step(self, run: PlannedRun) -> int:
        """Return the step of the newest checkpoint."""
        names = [path.stem for path in self.folder(run).glob("*/checkpoints/step-*.pt")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def logged_step(self, run: PlannedRun) -> int:
        """Return the step of the newest line of metrics."""
        for path in self.folder(run).glob("*/metrics.jsonl"):
            lines = path.read_text(encoding="utf-8").rsplit("\n", 2)
            if len(lines) > 1:  # the last line may be incomplete
                return int(json.loads(lines[-2])["step"])
        return 0


@dataclass
class Runner:
    """Trains runs in parallel.

    Attributes:
        folders: Folders of the runs.
        data: Folder with data sets.
        finished: Called with every finished run.
        failed: Runs that failed or were stopped.
    """

    folders: RunFolders
    data: Path
    finished: Callable[[PlannedRun], None]
    failed: list[PlannedRun] = field(default_factory=list)
    _running: dict[PlannedRun, subprocess.Popen[bytes]] = field(default_factory=dict)

    def work(self, choice: Choice, seconds: float) -> None:
        """Train until all runs have ended and none is left to start, or until the time is up.

        Args:
            choice: Chooses the runs to start.
            seconds: Time after which all runs save and stop.
        """
        end = time.monotonic() + seconds
        changed = True
        try:
            while changed or self._running:
                left = end - time.monotonic()
                if left < 0:
                    break
                for run in choice(list(self._running), left) if changed else ():
                    self._start(run)
                changed = self._reap()
                time.sleep(0.2)
        finally:
            self._stop()

    def _start(self, run: PlannedRun) -> None:
        folder, log = self.folders.folder(run), self.folders.log(run)
        words = [*run.words, "--data", str(self.data), "--out", str(folder), "--resume"]
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{run.path}: started", flush=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "kronbit", *words], stdout=file, stderr=file
            )
        self.folders.process_file(run).write_text(f"{process.pid}\n")
        self._running[run] = process

    def _reap(self) -> bool:
        """Handle the runs that have ended; return True if there are any."""
        ended = [run for run, process in self._running.items() if process.poll() is not None]
        for run in ended:
            self._end(run, stopping=False)
        return bool(ended)

    def _stop(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGINT)
        for run in list(self._running):
            self._end(run, stopping=True)

    def _end(self, run: PlannedRun, stopping: bool) -> None:
        code = self._running.pop(run).wait()
        file = self.folders.process_file(run)
        passed = time.time() - file.stat().st_mtime
        file.unlink()
        outcome = _OUTCOMES.get(code, f"exit {code}")
        print(f"{run.path}: {outcome} after {passed:.0f} s", flush=True)
        if code == 0:
            self.finished(run)
            return
        self.failed.append(run)
        # A run that is interrupted during its start may exit with any code.
        if code not in _OUTCOMES and not stopping:
            print(self.folders.log(run).read_text(errors="replace")[-_TAIL:], flush=True)
