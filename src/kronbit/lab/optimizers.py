"""Optimizers by name, as recipes and comparisons use them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from kronbit.algorithms import CASPR, KFAC, AdaBK, Shampoo
from kronbit.base import Wrapper, resolve
from kronbit.baselines import EVA, MFAC
from kronbit.config import Config
from kronbit.lab.errors import LabError, lab_error, refuse_unknown
from kronbit.lab.models import build
from kronbit.lab.muon import MuonBesideBase
from kronbit.lab.recipe import OPTIMIZERS, Recipe, parse_settings
from kronbit.optimizer import SecondOrder

_PAPER = {"method": "eigen", "storage": "paper"}
# Ways to store the second-order state: key -> (label, options).
Ways: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]
WAYS: Ways = {
    "32": ("32-bit {}", {"bits": 32}),
    "4-naive": ("4-bit {} (naive)", {"bits": 4, "method": "naive", "storage": "paper"}),
    "4-paper": ("4-bit {} (paper)", {"bits": 4, **_PAPER}),
    "4-eigen": ("4-bit {} (eigen)", {"bits": 4, "method": "eigen"}),
    "3": ("3-bit {}", {"bits": 3}),
    "4": ("4-bit {} (default)", {"bits": 4}),
    "6+4": ("6-bit {}, 4-bit roots", {"bits": 6, "root_bits": 4}),
    "8": ("8-bit {}", {"bits": 8}),
    "8-paper": ("8-bit {} (paper)", {"bits": 8, **_PAPER}),
}
# Optimizers of a comparison by name, as settings of the recipe, in addition to OPTIMIZERS.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    f"{name}-{key}": {"optimizer": name, **WAYS[key][1]}
    for name in ("shampoo", "caspr", "kfac", "adabk")
    for key in ("32", "4-naive", "4-paper", "4", "8")
    if name in ("shampoo", "caspr") or key in ("32", "4-paper", "4")
}
DEFAULT_VARIANTS = ("base", "shampoo-32", "shampoo-4-naive", "shampoo-4-paper", "shampoo-4")
BASE_LABELS = {
    "sgd": "SGDM",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadamw": "NAdamW",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adamw8bit": "8-bit AdamW",
    "schedulefree-adamw": "AdamW, schedule-free",
    "schedulefree-sgd": "SGD, schedule-free",
}
ALGORITHMS: Mapping[str, tuple[type[SecondOrder], str]] = {
    "shampoo": (Shampoo, "Shampoo"),
    "caspr": (CASPR, "CASPR"),
    "kfac": (KFAC, "K-FAC"),
    "adabk": (AdaBK, "AdaBK"),
}
_BASELINES: dict[str, tuple[type[Wrapper], str]] = {"eva": (EVA, "EVA"), "mfac": (MFAC, "M-FAC")}


def label_of(recipe: Recipe) -> str:
    """Return the optimizer's label in tables: "AdamW", "+ 4-bit Shampoo (paper)"."""
    if recipe.optimizer == "base":
        return BASE_LABELS.get(recipe.base, recipe.base.rpartition(".")[2])
    if recipe.optimizer == "muon":
        return "Muon"
    if recipe.optimizer in _BASELINES:
        return f"+ {_BASELINES[recipe.optimizer][1]}"
    options = recipe.second_order_options()
    method = options.get("method")
    how = "paper" if method == "eigen" and options.get("storage") == "paper" else method
    label = f"+ {options.get('bits', Config.bits)}-bit {ALGORITHMS[recipe.optimizer][1]}"
    return f"{label} ({how})" if how else label


def variant(spec: str, recipe: Recipe) -> tuple[str, str, Recipe]:
    """Return a key for folders, a label for tables, and the recipe of a comparison's optimizer.

    ``spec`` is a key of ``VARIANTS`` or the name of an optimizer, followed by settings, as in
    ``"shampoo-4 beta=0.9 lr=2e-3"``; ``"base longer=1.5"`` trains 1.5 times as long.
    """
    name, *given = shlex.split(spec) or [""]
    refuse_unknown("an optimizer", [name], [*VARIANTS, *OPTIMIZERS])
    settings = parse_settings(given)
    longer = settings.pop("longer", 1)
    if not (isinstance(longer, (int, float)) and longer > 0):
        raise LabError(f"longer must be a positive number; got {longer!r}")
    made = recipe.with_settings({**VARIANTS.get(name, {"optimizer": name}), **settings})
    refuse_unused_options(made, recipe.options)
    if longer != 1:
        length = {"epochs": made.epochs * longer} if made.epochs else {}
        made = made.with_settings(length or {"steps": round((made.steps or 0) * longer)})
    label = label_of(made)
    for text in given:
        key, _, value = text.partition("=")
        if key == "longer":
            label += f", {value} x as long"
        elif (name, key) != ("base", "base"):  # the label names this one already
            label += f", {text}"
    return "-".join([name, *given]).replace("/", "_"), label, made


def refuse_unused_options(recipe: Recipe, shared: Collection[str] = ()) -> None:
    """Refuse second-order options for a first-order optimizer, unless a comparison shares them."""
    unused = [name for name in recipe.options if name not in shared]
    if unused and recipe.optimizer in ("base", "muon"):
        raise LabError(f"{unused[0]} is not an option of {recipe.optimizer}: leave it out")


def check_optimizer(recipe: Recipe) -> None:
    """Build the optimizer on the meta device, to refuse wrong options before a comparison."""
    with torch.device("meta"):  # takes neither memory nor time
        model = build(**recipe.model)
    make_optimizer(recipe, model, warmup=0)


def make_optimizer(
    recipe: Recipe, model: nn.Module, warmup: int, scaler: torch.amp.GradScaler | None = None
) -> Optimizer:
    """Build the optimizer of a recipe.

    K-FAC, AdaBK and EVA watch the layers of the model. A schedule-free F handles the warm-up steps
    itself. K-FAC divides its statistics by the scale of the loss scaler, in fp16 training.
    """
    params = list(model.named_parameters())
    keywords: dict[str, Any] = {"lr": recipe.lr, **recipe.base_options}
    if recipe.base in ("sgd", "adam", "adamw") and params[0][1].device.type == "cuda":
        keywords.setdefault("fused", True)  # the fastest kernels on a GPU
    if recipe.schedule == "schedule-free":
        keywords.setdefault("warmup_steps", warmup)
    with lab_error("", TypeError, ValueError, ImportError, RuntimeError):
        if recipe.optimizer == "base":
            return resolve(params, recipe.base, keywords)
        if recipe.optimizer == "muon":
            return MuonBesideBase(model, recipe.base, keywords)
        keywords |= {"base": recipe.base, **recipe.second_order_options()}
        if recipe.optimizer in ("kfac", "adabk", "eva"):
            keywords["model"] = model
        if recipe.optimizer in ("kfac", "adabk"):
            keywords["grad_scaler"] = scaler if scaler and scaler.is_enabled() else None
        kind = {**_BASELINES, **ALGORITHMS}[recipe.optimizer][0]
        return kind(params, **keywords)
