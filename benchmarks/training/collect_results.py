"""Put finished runs of the lab into one small file: their summaries, and their curves.

Usage::

    python benchmarks/training/collect_results.py RUNS... --output results/NAME/summary.json \
        [--commit HASH] [--side-by-side N]

RUNS are folders of runs or of comparisons, as for ``kronbit report``. Where several ran at once on
one GPU, their times say nothing of an optimizer, and are left out.
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
    """At every evaluation: what it found, and the mean training loss since the last one."""
    found: dict[str, list[float | None]] = {"step": [], "train_loss": [], "loss": []}
    before = 0
    for line in run.evals:
        step = line["step"]
        # A line of training is the mean over the steps since the line before.
        total, count, last = 0.0, 0, before
        for own in run.train:
            if before < own["step"] <= step:
                total += own["loss"] * (own["step"] - last)
                count += own["step"] - last
                last = own["step"]
        found["step"].append(step)
        found["train_loss"].append(_short(total / max(count, 1)))
        found["loss"].append(_short(line["loss"]))
        if "accuracy" in line:
            found.setdefault("accuracy", []).append(line["accuracy"])
        before = step
    return found


def errors(run: Run) -> dict[str, Any]:
    """The mean errors of the watched roots at every refresh."""

    def lists(lines: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
        return {name: [_short(line[name]) for line in lines] for name in ("nre", "angle")}

    found = {"step": [line["step"] for line in run.errors], **lists(run.errors)}
    if all("off_diagonal" in line for line in run.errors):
        found["off_diagonal"] = lists([line["off_diagonal"] for line in run.errors])
    return found


def collected(run: Run, side_by_side: int) -> dict[str, Any]:
    left_out = ("format", "errors", "hardware", "versions", *(_TIMES if side_by_side > 1 else ()))
    kept = {name: value for name, value in run.summary.items() if name not in left_out}
    kept["command"] = _without_data(run.command)
    found = {**kept, "lr": run.settings["lr"], "diverged": run.diverged, "curve": curve(run)}
    if side_by_side == 1:
        found["steady_ms"] = steady_ms(run)
    return {**found, "errors": errors(run)} if run.errors else found


def steady_ms(run: Run) -> float | None:
    """The mean time of a step in the second half, when roots are in use and kernels compiled."""
    times = [value for line in run.train for value in line["step_ms"]]
    later = times[len(times) // 2 :]
    return _short(sum(later) / len(later)) if later else None


def _without_data(command: str) -> str:
    """Where the data lay on the machine of a run is nobody's business."""
    words = shlex.split(command)
    if "--data" in words:
        at = words.index("--data")
        del words[at : at + 2]
    return shlex.join(words)


def _short(value: float | None) -> float | None:
    """Six digits; JSON has no NaN, and null stands for what is no number any more."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def same(values: Sequence[Any], what: str) -> Any:
    """The value that all have.

    Raises:
        ValueError: If they differ.
    """
    if any(value != values[0] for value in values):
        raise ValueError(f"these runs do not belong into one file: {what} differs")
    return values[0]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """JSON with a line per run."""
    runs = content["runs"]
    head = json.dumps({**content, "runs": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(run, allow_nan=False)}" for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.replace('"runs": []', f'"runs": [\n{lines}\n ]') + "\n", encoding="utf-8")


def write_collected(
    folders: Sequence[Path], target: Path, commit: str = "", side_by_side: int = 1
) -> None:
    """Put the runs in some folders into one file.

    Args:
        folders: Of runs or comparisons.
        target: The file.
        commit: That they were run with.
        side_by_side: How many shared the device.

    Raises:
        ValueError: If a run is unfinished, or they do not belong into one file.
    """
    runs = find_runs(folders)
    unfinished = [str(run.folder) for run in runs if not (run.finished or run.diverged)]
    if unfinished:
        raise ValueError(f"unfinished: {', '.join(unfinished)}")
    content = {
        "recipe": same([run.recipe for run in runs], "recipe"),
        "hardware": same([run.hardware for run in runs], "hardware"),
        "versions": same([run.versions for run in runs], "versions"),
        "commit": commit,
        "side_by_side": side_by_side,
        "runs": [collected(run, side_by_side) for run in runs],
    }
    write(target, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", default="", help="that they were run with")
    parser.add_argument("--side-by-side", type=int, default=1, help="how many at once on one GPU")
    given = parser.parse_args()
    try:
        write_collected(given.runs, given.output, given.commit, given.side_by_side)
    except ValueError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
