"""Reading of run folders: the files of one training, or of the trainings of a comparison."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronbit.lab.errors import LabError
from kronbit.lab.optimizers import DEFAULT_VARIANTS

FORMAT = 1
# The variants of a comparison appear in this order; all others follow by name.
ORDER = DEFAULT_VARIANTS
# The keys that each kind of metrics line must have; their values may be null.
_NUMBERS = {
    "train": ("loss", "seconds"),
    "eval": ("loss", "seconds"),
    "errors": ("nre", "angle"),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: Folder of the run's files.
        label: Display name of the optimizer.
        variant: Key of the optimizer in a comparison.
        recipe: Name of the recipe.
        seed: Seed of weights and batches.
        command: Command that repeats the run.
        settings: Settings of the recipe.
        versions: Versions of Python and of the packages that were used.
        hardware: Description of the machine.
        started: Start time in ISO 8601.
        train: Training lines of the metrics, ordered by step.
        evals: Evaluation lines, ordered by step.
        errors: Lines about the errors of stored inverse roots, ordered by step.
        summary: Content of ``summary.json``; for an unfinished run, the same numbers computed from
            its metrics.
        finished: True if the run completed.
    """

    folder: Path
    label: str
    variant: str
    recipe: str
    seed: int
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    hardware: str
    started: str
    train: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    errors: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    finished: bool

    @property
    def diverged(self) -> bool:
        """True if a training or validation loss is not finite."""
        return not all(math.isfinite(line["loss"]) for line in (*self.train, *self.evals))

    @property
    def full_label(self) -> str:
        """The label, marked if the run diverged or is unfinished."""
        return with_notes(self.label, self.diverged, self.finished)

    def number(self, *path: str) -> float | None:
        """Return a number of the summary, or None if it is missing.

        Args:
            *path: Keys from the outermost to the innermost. Two numbers are derived: ``"seed"`` is
                the run's seed, ``"state"`` the bytes of statistics and roots together.
        """
        if path == ("seed",):
            return self.seed
        if path == ("state",):
            parts = [self.number("memory", key) for key in ("statistics", "roots")]
            known = [part for part in parts if part is not None]
            return sum(known) if known == parts else None
        value: Any = self.summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    @property
    def step_ms(self) -> list[float]:
        """Time of every step in milliseconds."""
        return _step_ms(self.train)


def with_notes(label: str, diverged: bool, finished: bool) -> str:
    """Append ``diverged`` and ``unfinished`` to a label, in brackets, where they apply.

    Args:
        label: Label of one run or of several.
        diverged: True if one of the runs diverged.
        finished: True if all of the runs completed.
    """
    notes = ["diverged"] * diverged + ["unfinished"] * (not finished)
    return f"{label} ({', '.join(notes)})" if notes else label


def rank(variant: str) -> int:
    """Return the position of a variant in tables and legends.

    Args:
        variant: Key of the variant.
    """
    return ORDER.index(variant) if variant in ORDER else len(ORDER)


def read_run(folder: Path) -> Run:
    """Read a run folder. The run may be unfinished.

    Args:
        folder: Folder with a ``run.json``.

    Raises:
        LabError: If the folder holds no run, or one of its files is broken.
    """
    _check_exists(folder)
    if not _is_run(folder):
        raise LabError(f"{folder} holds no run: it has no run.json")
    about = _read_json(folder / "run.json")
    missing = [key for key in ("label", "variant", "recipe", "seed", "command") if key not in about]
    if missing:
        raise LabError(f"{folder / 'run.json'} does not say {missing[0]!r}: train this run again")
    lines = _read_lines(folder / "metrics.jsonl")
    kinds = {
        kind: sorted((line for line in lines if line["kind"] == kind), key=lambda row: row["step"])
        for kind in _NUMBERS
    }
    ended = (folder / "summary.json").exists()
    summary = _read_json(folder / "summary.json") if ended else _summary_so_far(kinds)
    settings = about["recipe"]
    return Run(
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
        train=kinds["train"],
        evals=kinds["eval"],
        errors=kinds["errors"],
        summary=summary,
        finished=ended and bool(summary.get("finished", True)),
    )


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of run folders and comparison folders, each run once.

    Args:
        paths: Run folders, which have a ``run.json``, or folders that contain run folders.

    Raises:
        LabError: If a folder does not exist, holds no run, or holds a broken one.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        _check_exists(path)
        folders = [path] if _is_run(path) else [inner for inner in path.iterdir() if _is_run(inner)]
        if not folders:
            raise LabError(f"{path} holds no run: neither it nor a folder in it has a run.json")
        for run in sorted(map(read_run, folders), key=_place):
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by recipe, in the order in which the recipes first appear.

    Args:
        runs: Runs of any recipes.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.recipe, []).append(run)
    return groups


def _place(run: Run) -> tuple[int, str, int]:
    return rank(run.variant), run.variant, run.seed


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _check_exists(folder: Path) -> None:
    if not folder.exists():
        raise LabError(f"{folder} does not exist: name the folder of a run or of a comparison")
    if not folder.is_dir():
        raise LabError(f"{folder} is a file: name the folder of a run or of a comparison")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except ValueError:
        content = None
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
            lines += _checked(json.loads(text)) if text.strip() else []
        except ValueError:
            if not text.endswith(b"\n"):  # the run was interrupted while it wrote this line
                break
            raise LabError(
                f"{path}, line {number} is broken: remove it or train this run again"
            ) from None
    return lines


def _checked(line: Any) -> list[dict[str, Any]]:
    """Return the line with null replaced by NaN, or nothing if its kind is unknown."""
    if not isinstance(line, dict):
        raise ValueError
    kind = line.get("kind")
    if kind not in _NUMBERS:
        return []
    numbers = [line[key] for key in _NUMBERS[kind] if key in line]
    if len(numbers) < len(_NUMBERS[kind]) or not isinstance(line.get("step"), int | float):
        raise ValueError
    if not all(isinstance(value, int | float | None) for value in numbers):
        raise ValueError
    # JSON has no NaN: a loss that is not finite is written as null.
    return [line | {key: math.nan for key in _NUMBERS[kind] if line[key] is None}]


def _summary_so_far(kinds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Compute the summary of an unfinished run from its metrics."""
    train, evals, errors = (kinds[kind] for kind in ("train", "eval", "errors"))
    times = _step_ms(train)
    accuracies = [line["accuracy"] for line in evals if line.get("accuracy") is not None]
    middle = {"median": statistics.median(times), "mean": statistics.fmean(times)} if times else {}
    return {
        "steps": train[-1]["step"] if train else 0,
        "finished": False,
        "train_loss": train[-1]["loss"] if train else None,
        "loss": evals[-1]["loss"] if evals else None,
        "best_loss": min((line["loss"] for line in evals), default=None),
        "accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "seconds": train[-1]["seconds"] if train else 0.0,
        "step_ms": middle,
        "errors": {key: errors[-1][key] for key in ("nre", "angle")} if errors else None,
    }


def _step_ms(train: Sequence[Mapping[str, Any]]) -> list[float]:
    return [time for line in train for time in line.get("step_ms", ())]
