"""Collect summaries and curves of finished runs of the lab in one small file.

Usage::

    python benchmarks/training/collect_results.py RUNS... --output results/NAME/summary.json \
        [--commit HASH] [--side-by-side N]

RUNS are folders of runs or of comparisons, as for ``kronbit report``. Times of runs that shared a
GPU say nothing about an optimizer and are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kronbit.lab.report.runs import Run, find_runs

_TIMES = ("seconds", "step_ms")


def curve(run: Run) -> dict[str, list[float | None]]:
    """Return losses at every evaluation, with the mean training loss since the one before."""
    points: dict[str, list[float | None]] = {"step": [], "train_loss": [], "loss": []}
    before = 0
    for line in run.evals:
        step = line["step"]
        # A line of training metrics is the mean over the steps since the previous line.
        total, count, last = 0.0, 0, before
        for entry in run.train:
            if before < entry["step"] <= step:
                total += entry["loss"] * (entry["step"] - last)
                count += entry["step"] - last
                last = entry["step"]
        points["step"].append(step)
        points["train_loss"].append(_short(total / max(count, 1)))
        points["loss"].append(_short(line["loss"]))
        if "accuracy" in line:
            points.setdefault("accuracy", []).append(line["accuracy"])
        before = step
    return points


def errors(run: Run) -> dict[str, Any]:
    """Return the mean errors of the watched roots at every refresh."""

    def lists(lines: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
        return {name: [_short(line[name]) for line in lines] for name in ("nre", "angle")}

    series = {"step": [line["step"] for line in run.errors], **lists(run.errors)}
    if all("off_diagonal" in line for line in run.errors):
        series["off_diagonal"] = lists([line["off_diagonal"] for line in run.errors])
    return series


def collect(run: Run, side_by_side: int) -> dict[str, Any]:
    """Return the row of a run: its summary without values common to the file, and its curves."""
    left_out = ("format", "errors", "hardware", "versions", *(_TIMES if side_by_side > 1 else ()))
    kept = {name: value for name, value in run.summary.items() if name not in left_out}
    kept["command"] = _without_data(run.command)
    row = {**kept, "lr": run.settings["lr"], "diverged": run.diverged, "curve": curve(run)}
    if side_by_side == 1:
        row["steady_ms"] = steady_ms(run)
    return {**row, "errors": errors(run)} if run.errors else row


def steady_ms(run: Run) -> float | None:
    """Return the mean time of a step in the second half, after kernels are compiled."""
    times = [value for line in run.train for value in line["step_ms"]]
    second_half = times[len(times) // 2 :]
    return _short(sum(second_half) / len(second_half)) if second_half else None


def _without_data(command: str) -> str:
    """Return the command without ``--data``: the folder depends on the machine."""
    words = shlex.split(command)
    if "--data" in words:
        at = words.index("--data")
        del words[at : at + 2]
    return shlex.join(words)


def _short(value: float | None) -> float | None:
    """Round to six digits; NaN and infinity, which JSON lacks, become None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def common_value(values: Sequence[Any], what: str) -> Any:
    """Return the value that is common to all runs.

    Raises:
        ValueError: If the values differ.
    """
    if any(value != values[0] for value in values):
        raise ValueError(f"runs cannot share a file: {what} differs")
    return values[0]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with one line per run."""
    runs = content["runs"]
    head = json.dumps({**content, "runs": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(run, allow_nan=False)}" for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.replace('"runs": []', f'"runs": [\n{lines}\n ]') + "\n", encoding="utf-8")


def write_collected(
    folders: Sequence[Path], target: Path, commit: str = "", side_by_side: int = 1
) -> None:
    """Collect the runs of some folders in one file.

    Args:
        folders: Folders of runs or comparisons.
        target: The file.
        commit: Commit of the runs.
        side_by_side: Number of runs that shared the device.

    Raises:
        ValueError: If a run is unfinished, or if recipe, hardware or versions differ.
    """
    runs = find_runs(folders)
    unfinished = [str(run.folder) for run in runs if not (run.finished or run.diverged)]
    if unfinished:
        raise ValueError(f"unfinished: {', '.join(unfinished)}")
    content = {
        "recipe": common_value([run.recipe for run in runs], "recipe"),
        "hardware": common_value([run.hardware for run in runs], "hardware"),
        "versions": common_value([run.versions for run in runs], "versions"),
        "commit": commit,
        "side_by_side": side_by_side,
        "runs": [collect(run, side_by_side) for run in runs],
    }
    write(target, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", default="", help="commit of the runs")
    parser.add_argument(
        "--side-by-side", type=int, default=1, help="number of runs that shared the GPU"
    )
    arguments = parser.parse_args()
    try:
        write_collected(arguments.runs, arguments.output, arguments.commit, arguments.side_by_side)
    except ValueError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
