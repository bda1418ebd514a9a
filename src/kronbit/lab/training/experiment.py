"""Runs in their folders, alone or as a comparison."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kronbit.lab.checkpoints import checkpoints
from kronbit.lab.errors import LabError, lab_error
from kronbit.lab.files import make_folder, write_json
from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import Recipe, find_recipe, recipe_from
from kronbit.lab.training.loop import Interrupted, Training
from kronbit.lab.training.measures import hardware, versions
from kronbit.lab.training.summary import summarise
from kronbit.lab.training.terminal import Terminal
from kronbit.lab.training.world import World

FORMAT = 1
_FLAGS = ("optimizer", "bits", "base", "amp", "seed")  # settings with an option besides --set


@dataclass(frozen=True)
class Trial:
    """One run of a comparison."""

    key: str  # name in folders
    label: str  # name in tables
    recipe: Recipe
    command: str  # repeats the run

    @property
    def folder(self) -> str:
        """Name of the run's folder in a comparison."""
        return f"{self.key}-seed{self.recipe.seed}"


def make_trial(spec: str, recipe: Recipe, source: str, world: World) -> Trial:
    """Return the run of a recipe with an optimizer; see ``kronbit.lab.optimizers.variant``.

    ``source`` is the name or the file of the recipe.
    """
    key, label, made = variant(spec, recipe)
    return Trial(key, label, made, train_command(made, source, world))


def _launched(world: World) -> list[str]:
    """Return the start of a command line that trains on these ranks."""
    if world.parallel == "none":
        return ["kronbit", "train"]
    launcher = ["torchrun", "--nproc-per-node", str(world.ranks), "-m", "kronbit", "train"]
    return [*launcher, "--parallel", world.parallel]


def resume_command(folder: Path, world: World) -> str:
    """Return the command that resumes a run. Its settings are in the folder."""
    return shlex.join([*_launched(world), "--resume", str(folder)])


def train_command(recipe: Recipe, source: str, world: World) -> str:
    """Return the command that repeats a run: the source and all settings that differ from it."""
    words, settings = [*_launched(world), source], []
    before = _flat(find_recipe(source))
    for key, value in _flat(recipe).items():
        if value == before.get(key, ...) or (value is None and key in ("epochs", "steps")):
            continue  # it is the same, or the other one of epochs and steps is set
        text = value if isinstance(value, str) else json.dumps(value)
        if key in _FLAGS:
            words += [f"--{key}", text]
        else:
            settings += ["--set", f"{key}={text}"]
    words += ["--compile"] * world.compile + ["--cuda-graph"] * world.graph
    if world.data != World.data:
        words += ["--data", str(world.data)]
    return shlex.join(words + settings)


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Return all settings by their names for ``--set``."""
    flat: dict[str, Any] = {}
    for name, value in asdict(recipe).items():
        if isinstance(value, Mapping):
            prefix = "" if name in ("options", "base_options") else f"{name}."
            flat |= {f"{prefix}{key}": part for key, part in value.items()}
        else:
            flat[name] = value
    return flat


def run_trial(
    trial: Trial, folder: Path, world: World, terminal: Terminal, resume: bool
) -> dict[str, Any]:
    """Train, and write ``run.json``, ``metrics.jsonl``, checkpoints and ``summary.json``.

    Returns the summary.

    Raises:
        LabError: If the run is impossible, or data, a package or space on the disk is missing.
        Interrupted: If the user wants to stop.
    """
    names = {"label": trial.label, "variant": trial.key, "command": trial.command}
    origin = {"format": FORMAT, **names, **_machine(world)}
    if not resume and checkpoints(folder):
        raise LabError(f"{folder} has checkpoints of another run: choose another --out")
    training = Training(trial.recipe, folder, world)  # raises before anything is written
    if world.first:
        make_folder(folder)
        if not resume:
            details = {
                "recipe": asdict(trial.recipe),
                "seed": trial.recipe.seed,
                "running": {
                    "parallel": world.parallel,
                    "ranks": world.ranks,
                    "device": world.device.type,
                    "data": str(world.data.absolute()),
                    "compile": world.compile,
                    "graph": world.graph,
                },
                "started": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            }
            write_json(folder / "run.json", origin | details)
    world.wait()
    training.run(terminal, trial.label, resume)
    summary = origin | summarise(training)
    if world.first:
        write_json(folder / "summary.json", summary)
    return summary


def read_trial(folder: Path) -> tuple[Trial, dict[str, Any]]:
    """Read the run of a folder, and how it was started: attributes of ``World``.

    Raises:
        LabError: If the folder has no readable ``run.json``.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise LabError(f"{folder} is not the folder of a run: it has no run.json")
    with lab_error(f"cannot read {path}", OSError, KeyError, TypeError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        recipe = recipe_from(content["recipe"], content["recipe"]["name"], str(path))
        trial = Trial(content["variant"], content["label"], recipe, content["command"])
        return trial, dict(content["running"])


def run_all(
    trials: Sequence[Trial], folder: Path, world: World, terminal: Terminal, resume: bool
) -> list[dict[str, Any]]:
    """Run a comparison, one run after the other, each in its folder.

    ``resume`` keeps finished runs and resumes the others from their checkpoints. Returns the
    summary of each run, with the name of its ``folder``.

    Raises:
        Interrupted: If the user wants to stop.
    """
    summaries = []
    for trial in trials:
        place = folder / trial.folder
        done = place / "summary.json"
        finished = resume and done.is_file()
        goes_on = resume and bool(checkpoints(place)) and (place / "run.json").is_file()
        if (goes_on or finished) and read_trial(place)[0].recipe != trial.recipe:
            raise LabError(f"{place} was run with other settings: choose another --out")
        if not finished:
            if terminal.interrupted:
                raise Interrupted
            if place.exists() and not goes_on:
                shutil.rmtree(place)
            run_trial(trial, place, world, terminal, goes_on)
        summary = json.loads(done.read_text(encoding="utf-8"))
        summaries.append({**summary, "folder": trial.folder})
    return summaries


def write_comparison(
    folder: Path, recipe: Recipe, command: str, world: World, summaries: list[dict[str, Any]]
) -> None:
    """Write the ``summary.json`` of a comparison."""
    content = {"format": FORMAT, "recipe": recipe.name, "about": recipe.about, "command": command}
    write_json(folder / "summary.json", content | _machine(world) | {"runs": summaries})


def _machine(world: World) -> dict[str, Any]:
    return {"versions": versions(), "hardware": hardware(world.device)}
