"""Run folders: one training, or the trainings of a comparison, read back from their files."""

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
# Variants of a comparison appear in this order; others follow, by name.
ORDER = DEFAULT_VARIANTS
# What a line of metrics must have to be of use; its numbers may be null.
_NUMBERS = {
    "train": ("loss", "seconds"),
    "eval": ("loss", "seconds"),
    "errors": ("nre", "angle"),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: Where its files are.
        label: The optimizer's name for people.
        variant: The optimizer's name in a comparison.
        recipe: The name of its recipe.
        seed: Of weights and batches.
        command: What to type to get it again.
        settings: Everything that its recipe says.
        versions: Of what it ran with.
        hardware: What it ran on.
        started: When, as ISO 8601 says it.
        train: Lines of training, in order of steps.
        evals: Lines of evaluation.
        errors: Lines about stored inverse roots.
        summary: What ``summary.json`` says; of an unfinished run, what its lines tell.
        finished: Whether it came to its end.
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
        """Whether some loss is not a finite number."""
        return not all(math.isfinite(line["loss"]) for line in (*self.train, *self.evals))

    @property
    def full_label(self) -> str:
        """The label, with what to beware of."""
        return with_notes(self.label, self.diverged, self.finished)

    def number(self, *path: str) -> float | None:
        """A number of the summary, None where it is missing.

        Args:
            *path: Its keys, from the outside in; ``seed`` and ``state``, that is, statistics and
                roots, are known without one.
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
        """The time of every step, in order."""
        return _step_ms(self.train)


def with_notes(label: str, diverged: bool, finished: bool) -> str:
    """A label, with what to beware of in brackets.

    Args:
        label: The label of a run, or of several.
        diverged: Whether one of them diverged.
        finished: Whether all of them are finished.
    """
    notes = ["diverged"] * diverged + ["unfinished"] * (not finished)
    return f"{label} ({', '.join(notes)})" if notes else label


def rank(variant: str) -> int:
    """The place of a variant in a comparison.

    Args:
        variant: Its key.
    """
    return ORDER.index(variant) if variant in ORDER else len(ORDER)


def read_run(folder: Path) -> Run:
    """Read a run folder; the run may be unfinished.

    Args:
        folder: One with a ``run.json``.

    Raises:
        LabError: There is no run, or a file of it cannot be understood.
    """
    _check_exists(folder)
    if not _is_run(folder):
        raise LabError(f"{folder} holds no run: there is no run.json in it")
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
    """Read all runs of some run folders and comparison folders, each run once.

    Args:
        paths: Folders with a ``run.json``, or with such folders inside.

    Raises:
        LabError: A folder does not exist, holds no run, or holds one that cannot be understood.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        _check_exists(path)
        folders = [path] if _is_run(path) else [inner for inner in path.iterdir() if _is_run(inner)]
        if not folders:
            raise LabError(f"{path} holds no run: there is no run.json in it or one folder deeper")
        for run in sorted(map(read_run, folders), key=_place):
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of every recipe, in the order in which recipes first appear.

    Args:
        runs: Runs of any recipes.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.recipe, []).append(run)
    return found


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
    """Lines of the kinds that we know, null losses as NaN; a torn last line is left out."""
    if not path.exists():
        return []  # the run has just begun
    lines = []
    for number, text in enumerate(_read(path).splitlines(keepends=True), 1):
        try:
            lines += _checked(json.loads(text)) if text.strip() else []
        except ValueError:
            if not text.endswith(b"\n"):  # the run was interrupted in it
                break
            raise LabError(
                f"{path}, line {number} is broken: remove it or train this run again"
            ) from None
    return lines


def _checked(line: Any) -> list[dict[str, Any]]:
    """The line, or nothing if it is of a kind that we do not know."""
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
    # JSON has no NaN: who cannot write it writes null.
    return [line | {key: math.nan for key in _NUMBERS[kind] if line[key] is None}]


def _summary_so_far(kinds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What a summary would say now, as far as the lines tell."""
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
