"""Train the runs for docs/results: a queue for one GPU.

Usage::

    python benchmarks/training/run_queue.py --status
    python benchmarks/training/run_queue.py --next --seconds 560 --together 6 \
        --data DATA --out RUNS --results RESULTS [--later 220] [--commit HASH]
    python benchmarks/training/run_queue.py NAME... --data DATA --out RUNS [--together 6]
    python benchmarks/training/run_queue.py --merge

``trainings.py`` lists the runs; a NAME is a key of ``TRAININGS`` there, which is a table of runs.

``--next`` starts unfinished runs: stopped ones first, then by stage, the longest first. A run
starts only if it is expected to end in time next to the others: within ``--seconds`` plus the
``--later`` seconds in which the machine and RUNS remain available afterwards. After ``--seconds``
all runs save and stop, and the same command resumes them. With names, ``--next`` is limited to
these tables. Names without ``--next`` are trained to the end, however long that takes.

Every run is a process. Up to ``--together`` of them share the GPU. This affects only their times,
which are left out of their results. Runs that are timed have the GPU to themselves.

A finished run is written to RESULTS/NAME/runs/RUN.json at once. Runs with results there or in the
repository's ``results`` are not trained again, so a machine needs only the repository and DATA, and
only RESULTS must be kept. ``PYTHONPATH=src`` finds kronbit if it is not installed. The runs of a
complete table are merged into RESULTS/NAME/summary.json. After RESULTS is copied to ``results``,
``--merge`` does the same there.

``--status`` prints how many runs of each table are done, running, stopped and open, and how many
minutes the rest would take in sequence on one H200. With names, it prints a line for every run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from estimates import Estimate, estimate, fitting
from processes import RunFolders, Runner
from result_files import ResultFiles
from trainings import TRAININGS, PlannedRun

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@dataclass
class Queue:
    """Training runs by priority.

    Attributes:
        runs: All runs.
        folders: Folders of the runs.
        files: Files of their results.
        together: Largest number of runs at a time.
        later: Seconds available after this call.
        fits: True to start only runs that end in time.
        commit: Commit of the runs.
        started: Runs that this call has started.
    """

    runs: Sequence[PlannedRun]
    folders: RunFolders
    files: ResultFiles
    together: int
    later: float
    fits: bool
    commit: str
    started: set[PlannedRun] = field(default_factory=set)

    def choose(self, running: Sequence[PlannedRun], left: float) -> Sequence[PlannedRun]:
        """Return the runs to start now.

        Args:
            running: The runs that are running.
            left: Seconds until the end of this call.
        """
        waiting = [run for run in self.runs if not self.is_taken(run)]
        candidates = [run for run in waiting if run not in self.started]
        if self.fits:
            candidates.sort(key=self._place)
            loads = [(run, self.rest(run)) for run in candidates]
            rest = [self.rest(run) for run in running]
            candidates = fitting(loads, rest, left + self.later, self.together)
        chosen = startable(candidates, running, self.together)
        self.started.update(chosen)
        return chosen

    def is_taken(self, run: PlannedRun) -> bool:
        """True if a run is finished or is being trained."""
        done = self.folders.is_finished(run) or self.folders.is_running(run)
        return done or self._has_results(run)

    def _has_results(self, run: PlannedRun) -> bool:
        # Without ``fits``, a table is trained again although it has results.
        return self.files.is_done(run) if self.fits else self.files.part(run) is not None

    def rest(self, run: PlannedRun) -> Estimate:
        """Estimate the rest of a run."""
        step = self.folders.logged_step if self.folders.is_running(run) else self.folders.saved_step
        return estimate(run).rest(step(run))

    def _place(self, run: PlannedRun) -> tuple[bool, int, bool, float]:
        table = run.trainings
        return not self.folders.saved_step(run), table.stage, table.alone, -self.rest(run).seconds

    def write(self, run: PlannedRun) -> None:
        """Write the results of a run, and of its table if it is complete."""
        shared = 1 if run.trainings.alone else most_together(self.folders.out, self.together)
        self.files.add(run, self.folders.folder(run), self.commit, shared)
        self.merge(run.table)

    def write_finished(self) -> None:
        """Write results of finished runs that an earlier call did not write."""
        for run in self.runs:
            if self.folders.is_finished(run) and not self._has_results(run):
                self.write(run)

    def merge(self, table: str) -> None:
        """Write the file of a table if it is complete."""
        try:
            written = self.files.merge(table)
        except ValueError as error:
            print(f"{table} stays in parts: {error}", flush=True)
            return
        if written is not None:
            print(f"written: {written}", flush=True)


def startable(
    candidates: Iterable[PlannedRun], running: Sequence[PlannedRun], together: int
) -> list[PlannedRun]:
    """Return the runs that may start next to those that are running."""
    chosen: list[PlannedRun] = []
    for run in candidates:
        active = [*running, *chosen]
        if len(active) >= together or any(other.trainings.alone for other in active):
            break
        if not (active and run.trainings.alone):
            chosen.append(run)
    return chosen


def most_together(out: Path, together: int) -> int:
    """Return the largest number of runs that shared the device in any call with this folder."""
    path = out / "together.txt"
    most = max(together, int(path.read_text()) if path.is_file() else 1)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{most}\n")
    return most


def work(queue: Queue, data: Path, seconds: float) -> int:
    """Train; return the exit code, 0 if all started runs are finished."""
    most_together(queue.folders.out, queue.together)
    queue.write_finished()
    runner = Runner(queue.folders, data, queue.write)
    runner.work(queue.choose, seconds)
    waiting = [] if queue.fits else [run for run in queue.runs if not queue.is_taken(run)]
    unfinished = sorted({run.path for run in (*runner.failed, *waiting)})
    if unfinished:
        print(f"not finished: {', '.join(unfinished)}")
    return 1 if unfinished else 0


# ---------------------------------------------------------------------------------------- status


def show_status(queue: Queue, every_run: bool) -> None:
    """Print the progress of the tables and the estimated time of the rest."""
    head = f"{'stage':5}  {'table':38}{'done':>6}{'running':>9}{'stopped':>9}{'open':>6}"
    print(f"{head}{'minutes':>9}")
    total = 0.0
    for table in dict.fromkeys(run.table for run in queue.runs):
        runs = [run for run in queue.runs if run.table == table]
        states = {run: state_of(queue, run) for run in runs}
        minutes = sum(queue.rest(run).seconds / 60 for run in runs if states[run] != "done")
        total += minutes
        counts = [list(states.values()).count(kind) for kind in ("done", "running", "stopped")]
        cells = "".join(
            f"{count:>{width}}"
            for count, width in zip((*counts, len(runs) - sum(counts)), (6, 9, 9, 6), strict=True)
        )
        print(f"{runs[0].trainings.stage:5}  {table:38}{cells}{minutes:9.1f}")
        for run in runs:
            if every_run or states[run] in ("running", "stopped"):
                _show_run(queue, run, states[run])
    print(f"{'':5}  {'all, in sequence':38}{'':30}{total:9.1f}")


def _show_run(queue: Queue, run: PlannedRun, state: str) -> None:
    text = f"{'':9}{run.spec}, seed {run.seed}: {state}"
    if state != "done":
        load = queue.rest(run)
        steps = {"running": queue.folders.logged_step, "stopped": queue.folders.saved_step}
        place = f", step {steps[state](run):,} of {load.steps:,}" if state in steps else ""
        text += f"{place}, {load.seconds / 60:.1f} minutes"
    print(text)


def state_of(queue: Queue, run: PlannedRun) -> str:
    """Return the state of a run: ``"done"``, ``"running"``, ``"stopped"`` or ``"open"``."""
    if queue.folders.is_running(run):
        return "running"
    if queue.files.is_done(run) or queue.folders.is_finished(run):
        return "done"
    return "stopped" if queue.folders.saved_step(run) else "open"


# --------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--next", action="store_true", help="start the runs that fit into the time")
    parser.add_argument("--status", action="store_true", help="print what is done and open")
    parser.add_argument("--merge", action="store_true", help="merge the files of complete tables")
    parser.add_argument("--data", type=Path, help="folder with data sets")
    parser.add_argument("--out", type=Path, help="folder of runs and their checkpoints")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of raw files")
    parser.add_argument("--together", type=int, default=6, help="number of runs at a time")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time until all runs stop"
    )
    parser.add_argument(
        "--later", type=float, default=0.0, help="seconds available after this call"
    )
    parser.add_argument("--commit", default="", help="commit of the runs")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - TRAININGS.keys())
    if unknown:
        parser.error(f"no such table: {', '.join(unknown)}; choose from {', '.join(TRAININGS)}")
    read_only = options.status or options.merge
    if not read_only and not (options.next or options.names):
        parser.error("give names, --next, --status or --merge")
    if not read_only and (options.data is None or options.out is None):
        parser.error("training needs --data and --out")
    names = options.names or sorted(TRAININGS, key=lambda name: TRAININGS[name].stage)
    queue = Queue(
        [run for name in names for run in TRAININGS[name].runs(name)],
        RunFolders(options.out or ROOT / "runs"),
        ResultFiles(options.results, () if options.results == RESULTS else (RESULTS,)),
        options.together,
        options.later,
        options.next or read_only,
        options.commit,
    )
    if options.merge:
        for name in names:
            queue.merge(name)
    elif options.status:
        show_status(queue, bool(options.names))
    else:
        return work(queue, options.data, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
