"""Reads run folders: the files of one training run, or of the runs of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kronbit.lab.errors import LabError, lab_error
from kronbit.lab.optimizers import DEFAULT_VARIANTS

_Lines = Sequence[Mapping[str, Any]]
FORMAT = 1
# The keys that each kind of metrics line must have; their values may be null.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "train": ("loss", "seconds"),
    "eval": ("loss", "seconds"),
    "errors": ("nre", "angle"),
}


@dataclass(frozen=True)
class Run:
    """One training run. Lines of the metrics are ordered by step."""

    folder: Path
    label: str  # display name of the optimizer
    variant: str  # key of the optimizer in a comparison
    recipe: str
    seed: int
    command: str
    settings: Mapping[str, Any]  # of the recipe
    versions: Mapping[str, Any]
    hardware: str
    started: str  # in ISO 8601
    train: _Lines
    evals: _Lines
    errors: _Lines  # of stored inverse roots
    step_ms: Sequence[float]  # of every step
    summary: Mapping[str, Any]  # computed from the metrics if the run is unfinished
    finished: bool

    @property
    def diverged(self) -> bool:
        """True if a training or validation loss is not finite."""
        return not all(math.isfinite(line["loss"]) for line in (*self.train, *self.evals))

    @property
    def full_label(self) -> str:
        """The label, marked if the run diverged or is unfinished."""
        return with_notes(self.label, self.diverged, self.finished)

    def number(self, key: str) -> float | None:
        """Return a number of the summary, or None if it is missing.

        A dot separates nested keys, as in ``"memory.peak"``. ``"seed"`` is the run's seed, and
        ``"state"`` the bytes of statistics and roots together.
        """
        if key == "seed":
            return self.seed
        if key == "state":
            statistics, roots = self.number("memory.statistics"), self.number("memory.roots")
            return None if statistics is None or roots is None else statistics + roots
        value: Any = self.summary
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None


def with_notes(label: str, diverged: bool, finished: bool) -> str:
    """Append ``diverged`` and ``unfinished`` to a label, in brackets, where they apply."""
    notes = ["diverged"] * diverged + ["unfinished"] * (not finished)
    return f"{label} ({', '.join(notes)})" if notes else label


def position(variant: str) -> int:
    """Return the position of a variant in tables and legends; unknown ones come last."""
    return [*DEFAULT_VARIANTS, variant].index(variant)


def read_run(folder: Path) -> Run:
    """Read a run folder. The run may be unfinished.

    Raises:
        LabError: If a file is missing or broken.
    """
    about = _read_json(folder / "run.json")
    for key in ("label", "variant", "recipe", "seed", "command"):
        if key not in about:
            raise LabError(f"{folder / 'run.json'} has no {key!r}: train this run again")
    lines = _read_lines(folder / "metrics.jsonl")
    train, evals, errors = (
        sorted((line for line in lines if line["kind"] == kind), key=itemgetter("step"))
        for kind in _KEYS
    )
    ended, settings = folder / "summary.json", about["recipe"]
    summary = _read_json(ended) if ended.exists() else {"finished": False}
    run = Run(
        folder=folder,
        label=str(about["label"]),
        variant=str(about["variant"]),
        recipe=str(summary.get("recipe") or settings.get("name") or "a recipe without a name"),
        seed=int(about["seed"]),
        command=str(about["command"]),
        settings=settings,
        versions=about.get("versions") or {},
        hardware=str(about.get("hardware") or "unknown hardware"),
        started=str(about.get("started") or ""),
        train=train,
        evals=evals,
        errors=errors,
        step_ms=[time for line in train for time in line.get("step_ms", ())],
        summary=summary,
        finished=bool(summary.get("finished", True)),
    )
    return run if ended.exists() else replace(run, summary=_summary_so_far(run))


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of run folders, or of folders that contain run folders, each run once.

    Raises:
        LabError: If a folder does not exist, holds no run, or holds a broken one.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            problem = "is a file" if path.exists() else "does not exist"
            raise LabError(f"{path} {problem}: name the folder of a run or of a comparison")
        files = list(path.glob("run.json")) or list(path.glob("*/run.json"))
        if not files:
            raise LabError(f"{path} holds no run: neither it nor a folder in it has a run.json")
        runs_in_path = [read_run(file.parent) for file in files]
        for run in sorted(runs_in_path, key=lambda r: (position(r.variant), r.variant, r.seed)):
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by recipe, in the order in which the recipes first appear."""
    recipes = dict.fromkeys(run.recipe for run in runs)
    return {recipe: [run for run in runs if run.recipe == recipe] for recipe in recipes}


def _read(path: Path) -> bytes:
    with lab_error(f"cannot read {path}", OSError):
        return path.read_bytes()


def _read_json(path: Path) -> dict[str, Any]:
    content = None
    with suppress(ValueError):
        content = json.loads(_read(path))
    if not isinstance(content, dict):
        raise LabError(f"{path} is broken, not a JSON object: restore it or train this run again")
    if content.get("format", FORMAT) > FORMAT:
        raise LabError(f"{path} has format {content['format']}: install a newer kronbit to read it")
    return content


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the metrics lines of known kinds. An incomplete last line is dropped."""
    if not path.exists():
        return []  # the run has written no metrics yet
    lines = []
    for number, text in enumerate(_read(path).splitlines(keepends=True), 1):
        try:
            line = json.loads(text) if text.strip() else {}
            keys = _KEYS.get(str(line.get("kind")), ())
            if not all(isinstance(line[key], int | float | None) for key in keys):
                raise ValueError
            # JSON has no NaN: a loss that is not finite is written as null.
            missing = {key: math.nan for key in keys if line[key] is None}
            if keys:
                lines.append({**line, **missing, "step": int(line["step"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            if not text.endswith(b"\n"):  # the run was interrupted while it wrote this line
                break
            problem = f"{path}, line {number} is broken: remove it or train this run again"
            raise LabError(problem) from None
    return lines


def _summary_so_far(run: Run) -> dict[str, Any]:
    """Compute the summary of an unfinished run from its metrics."""
    trained, evaluated = run.train[-1] if run.train else {}, run.evals[-1] if run.evals else {}
    accuracies = [line["accuracy"] for line in run.evals if line.get("accuracy") is not None]
    times = run.step_ms
    return {
        "steps": trained.get("step", 0),
        "finished": False,
        "train_loss": trained.get("loss"),
        "loss": evaluated.get("loss"),
        "best_loss": min((line["loss"] for line in run.evals), default=None),
        "accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "seconds": trained.get("seconds", 0.0),
        "step_ms": {"median": median(times), "mean": fmean(times)} if times else {},
        "errors": run.errors[-1] if run.errors else None,
    }
