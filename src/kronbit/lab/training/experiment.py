"""One run in its folder, and several of them as a comparison."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronbit.lab.errors import LabError
from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import Recipe, find_recipe, recipe_from
from kronbit.lab.training.checkpoints import checkpoints
from kronbit.lab.training.display import Display
from kronbit.lab.training.files import make_folder, write_json
from kronbit.lab.training.loop import Running, Training
from kronbit.lab.training.measures import hardware, versions
from kronbit.lab.training.world import World

FORMAT = 1
_OWN_FLAGS = ("optimizer", "bits", "base", "amp")  # the others go through --set


@dataclass(frozen=True)
class Member:
    """One run: its name in folders, its name in tables, its settings, and how to get it again."""

    key: str
    label: str
    recipe: Recipe
    command: str


def member(spec: str, recipe: Recipe, source: str) -> Member:
    """A run of a recipe with an optimizer.

    Args:
        spec: See ``kronbit.lab.optimizers.variant``.
        recipe: What it starts from.
        source: The recipe's name or file.
    """
    key, label, made = variant(spec, recipe)
    return Member(key, label, made, train_command(made, source))


def train_command(recipe: Recipe, source: str) -> str:
    """What to type to get this recipe's run: the file, and what differs from it."""
    words = ["kronbit", "train", source]
    settings: list[str] = []
    before, after = find_recipe(source).to_mapping(), recipe.to_mapping()
    for name, value in after.items():
        if value == before[name] or value is None:
            continue
        if not isinstance(value, Mapping):
            found = {name: value}
        else:
            prefix = "" if name in ("options", "base_options") else f"{name}."
            found = {
                f"{prefix}{key}": own
                for key, own in value.items()
                if own != before[name].get(key, ...)
            }
        for key, own in found.items():
            text = own if isinstance(own, str) else json.dumps(own)
            if key in _OWN_FLAGS:
                words += [f"--{key}", text]
            else:
                settings += ["--set", f"{key}={text}"]
    return shlex.join(words + settings)


def run_member(
    member: Member, folder: Path, world: World, running: Running, display: Display, resume: bool
) -> dict[str, Any]:
    """Train, and write ``run.json``, ``metrics.jsonl``, checkpoints and ``summary.json``.

    Returns:
        The summary.

    Raises:
        LabError: If something cannot be had.
        Interrupted: If the user wants to stop.
    """
    origin = {
        "format": FORMAT,
        "label": member.label,
        "variant": member.key,
        "command": member.command,
        "versions": versions(),
        "hardware": hardware(world.device),
    }
    training = Training(member.recipe, folder, world, running)  # refuses before anything is written
    if world.first:
        make_folder(folder)
        if not resume:
            started = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
            details = {
                "recipe": member.recipe.to_mapping(),
                "seed": member.recipe.seed,
                "parallel": world.parallel,
                "ranks": world.ranks,
                "compile": running.compile,
                "cuda_graph": running.graph,
                "started": started,
            }
            write_json(folder / "run.json", origin | details)
    world.wait()
    summary = origin | training.run(display, member.label, resume)
    if world.first:
        write_json(folder / "summary.json", summary)
    return summary


def read_member(folder: Path) -> Member:
    """The run that a folder was made for.

    Raises:
        LabError: If there is none.
    """
    path = folder / "run.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        recipe = recipe_from(found["recipe"], found["recipe"]["name"], str(path))
        return Member(found["variant"], found["label"], recipe, found["command"])
    except OSError as error:
        raise LabError(f"{folder} is not the folder of a run: it has no run.json") from error
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"cannot read {path}: {error}") from error


def run_all(
    members: Sequence[Member],
    folder: Path,
    world: World,
    running: Running,
    display: Display,
    resume: bool,
) -> list[tuple[str, dict[str, Any]]]:
    """The runs of a comparison in turn, each in a folder of its own.

    Args:
        members: Which.
        folder: Of the comparison.
        world: Where this process stands.
        running: How they run.
        display: Where progress is shown.
        resume: Whether finished runs are kept, and others go on from their checkpoints.

    Returns:
        (folder's name, summary) of each.
    """
    found = []
    for one in members:
        name = f"{one.key}-seed{one.recipe.seed}"
        own = folder / name
        done = own / "summary.json"
        if resume and done.is_file():
            if read_member(own).recipe != one.recipe:
                raise LabError(f"{own} was run with other settings: choose another --out")
            summary = json.loads(done.read_text(encoding="utf-8"))
        else:
            goes_on = resume and bool(checkpoints(own)) and (own / "run.json").is_file()
            if own.exists() and not goes_on:
                shutil.rmtree(own)
            summary = run_member(one, own, world, running, display, goes_on)
        found.append((name, summary))
    return found


def write_comparison(
    folder: Path,
    recipe: Recipe,
    command: str,
    world: World,
    found: Sequence[tuple[str, Mapping[str, Any]]],
) -> None:
    """The comparison's ``summary.json``."""
    content = {
        "format": FORMAT,
        "recipe": recipe.name,
        "about": recipe.about,
        "command": command,
        "versions": versions(),
        "hardware": hardware(world.device),
        "runs": [{**summary, "folder": name} for name, summary in found],
    }
    write_json(folder / "summary.json", content)
