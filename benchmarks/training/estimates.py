"""Estimate the time of a training run on one H200, alone or next to other runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainings import PlannedRun

from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import Recipe, find_recipe, parse_settings

ROOT = Path(__file__).parents[2]
_START = 25.0  # seconds of imports, data, kernels and the capture of graphs
_EVALUATION = 0.6  # seconds
_WATCHED = 0.8  # seconds for the exact roots of a block, at every refresh
# Share of the GPU's time that a run takes. Processes take turns on the GPU, so ten at a time are
# hardly faster than ten in sequence, unless the host is the bottleneck.
_BUSY_WITH_GRAPH, _BUSY_WITHOUT = 0.9, 0.3
_FLOAT32 = 2.5  # slowdown without bf16 autocast
_EXAMPLES = {"cifar100": 50_000, "tiny-imagenet": 100_000, "digits": 1_400}
_FALLBACK = "shampoo"  # for optimizers that are not in a recipe's entry below
# Seconds per 1000 steps with a CUDA graph ("without graph": without one). Rows of
# results/*-times take precedence.
_PER_THOUSAND: dict[str, dict[str, float]] = {
    "cifar100-swin-tiny": {"base": 8.3, "shampoo": 9.4, "muon": 39, "without graph": 63},
    "cifar100-vit-small": {"base": 8, "shampoo": 9, "muon": 30, "without graph": 50},  # a guess
    "cifar100-resnet34": {"base": 5.4, "shampoo": 6.8, "mfac": 30, "without graph": 40},
    "cifar100-vgg19": {"base": 3, "shampoo": 4, "without graph": 20},  # a guess
    "tinyimagenet-swin-tiny": {"base": 10, "shampoo": 11, "muon": 40},  # a guess
    "tinyimagenet-vit-small": {"base": 8, "shampoo": 9, "muon": 30},  # a guess
    "tinyimagenet-resnet34": {"base": 16, "shampoo": 18},  # a guess
    "tinyimagenet-vgg19": {"base": 9, "shampoo": 10},  # a guess
    "wiki-gpt2-124m": {"base": 80, "shampoo": 82, "muon": 102},
    "wiki-llama-130m": {"base": 60, "shampoo": 62, "muon": 80},
    "wiki-llama-350m": {"base": 80, "shampoo": 82, "muon": 130},
    "pydoc-gpt": {"base": 60, "shampoo": 70},  # on a CPU
    "digits-cnn": {"base": 5, "shampoo": 10},  # on a CPU
}
_UNKNOWN = {"base": 50.0, "shampoo": 60.0}
_MARGIN = 1.05  # a run that does not end in time may be lost
_PYTHON_LOOP = 3  # slowdown by an optimizer that loops over parameters in Python


@dataclass(frozen=True)
class Estimate:
    """Estimated steps, time and load of a run.

    Attributes:
        steps: Number of steps.
        seconds: Time from start to end if it has the GPU to itself.
        busy: Share of the GPU's time that it uses.
    """

    steps: int
    seconds: float
    busy: float

    def rest(self, step: int) -> Estimate:
        """Estimate the rest of the run after some steps, including another start."""
        left = max(0.0, 1 - step / self.steps)
        return Estimate(self.steps, _START + left * (self.seconds - _START), self.busy)


@cache
def estimate(run: PlannedRun) -> Estimate:
    """Estimate the time of a run on an idle GPU."""
    recipe = recipe_of(run)
    steps = _steps(recipe)
    graph = "--cuda-graph" in run.trainings.flags
    seconds = steps * _milliseconds(run, recipe, graph) / 1000
    evaluations = steps // (recipe.eval_every or max(1, steps // 20)) + 1
    extra = evaluations * _EVALUATION + _watched(recipe, steps) * _WATCHED
    busy = _BUSY_WITH_GRAPH if graph else _BUSY_WITHOUT
    return Estimate(steps, _START + seconds + extra, busy)


def recipe_of(run: PlannedRun) -> Recipe:
    """Return all settings of a run."""
    settings = parse_settings(run.trainings.settings)
    flags = run.trainings.flags
    if "--amp" in flags:
        settings = {"amp": flags[flags.index("--amp") + 1], **settings}
    recipe = find_recipe(run.trainings.recipe).with_settings({**settings, "seed": run.seed})
    return variant(run.spec, recipe)[2]


def _steps(recipe: Recipe) -> int:
    if recipe.steps:
        return recipe.steps
    examples = _EXAMPLES[recipe.data["name"]] * (1 - recipe.holdout)
    return round((recipe.epochs or 0) * (examples // recipe.batch))


def _watched(recipe: Recipe, steps: int) -> int:
    """Return the number of exact roots that are compared with stored ones."""
    if recipe.optimizer not in ("shampoo", "caspr"):
        return 0
    refreshes = steps // int(recipe.second_order_options()["refresh_every"])
    return recipe.watched_blocks * refreshes


def _milliseconds(run: PlannedRun, recipe: Recipe, graph: bool) -> float:
    measured = _measured(recipe.name).get(run.spec.split()[0])
    table = _PER_THOUSAND.get(recipe.name, _UNKNOWN)
    kind = recipe.optimizer
    loops = "." in recipe.base
    if graph and measured is not None and not loops:
        per_step = measured
    else:
        per_step = table.get(kind, table[_FALLBACK])
        if not graph:
            per_step = max(per_step, table.get("without graph", per_step))
    in_float32 = recipe.amp == "off" and "--amp" in run.trainings.flags
    return per_step * (_FLOAT32 if in_float32 else 1) * (_PYTHON_LOOP if loops else 1)


@cache
def _measured(recipe: str) -> dict[str, float]:
    """Return milliseconds per step, by optimizer, from runs that had the GPU to themselves."""
    path = ROOT / "results" / f"{recipe}-times" / "summary.json"
    if not path.is_file():
        return {}
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    times = {run["variant"]: run.get("steady_ms") for run in runs}
    return {name: ms for name, ms in times.items() if ms is not None}


def finish_times(loads: Sequence[Estimate], together: int) -> list[float]:
    """Return the seconds until each run ends if they share the GPU.

    Args:
        loads: Estimates of the runs, in the order of their starts.
        together: Largest number of runs at a time.
    """
    left = [load.seconds for load in loads]
    ends = [0.0] * len(loads)
    active = list(range(min(together, len(loads))))
    following = len(active)
    now = 0.0
    while active:
        speed = min(1.0, 1 / sum(loads[at].busy for at in active))
        first = min(active, key=lambda at: left[at])
        passed = left[first] / speed
        now += passed
        for at in active:
            left[at] -= passed * speed
        ends[first] = now
        active.remove(first)
        if following < len(loads):
            active.append(following)
            following += 1
    return ends


def fitting(
    candidates: Sequence[tuple[PlannedRun, Estimate]],
    running: Sequence[Estimate],
    seconds: float,
    together: int,
) -> list[PlannedRun]:
    """Return the candidates that can be added so that all runs end in time.

    Args:
        candidates: Runs with their estimates, by priority.
        running: Estimates of the rest of the runs that are running.
        seconds: Time that is left.
        together: Largest number of runs at a time.
    """
    loads, chosen = list(running), []
    for run, load in candidates:
        if _MARGIN * max(finish_times([*loads, load], together)) <= seconds:
            loads.append(load)
            chosen.append(run)
    return chosen
