"""Optimizers by name, as recipes and comparisons use them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kronbit.algorithms import CASPR, KFAC, AdaBK, Shampoo
from kronbit.base import Around, resolve
from kronbit.baselines import EVA, MFAC
from kronbit.config import Config
from kronbit.lab.errors import LabError, one_line, refuse_unknown
from kronbit.lab.models import build
from kronbit.lab.muon import MuonBesideBase
from kronbit.lab.recipe import OPTIMIZERS, Recipe, parse_settings
from kronbit.optimizer import SecondOrder

_FUSED = ("sgd", "adam", "adamw")  # their fused kernels are the fastest on a GPU

_STORAGES: Mapping[str, Mapping[str, Any]] = {
    "32": {"bits": 32},
    "4-naive": {"bits": 4, "method": "naive", "storage": "paper"},
    "4-paper": {"bits": 4, "method": "eigen", "storage": "paper"},
    "4": {"bits": 4},
    "8": {"bits": 8},
}
# Optimizers of a comparison by name, as settings of the recipe, in addition to OPTIMIZERS.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    f"{name}-{key}": {"optimizer": name, **options}
    for name in ("shampoo", "caspr", "kfac", "adabk")
    for key, options in _STORAGES.items()
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
_BASELINES: Mapping[str, tuple[type[Around], str]] = {"eva": (EVA, "EVA"), "mfac": (MFAC, "M-FAC")}


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
    """Resolve one optimizer of a comparison.

    Args:
        spec: A key of ``VARIANTS`` or the name of an optimizer, followed by settings, as in
            ``"shampoo-4 beta=0.9 lr=2e-3"``; ``"base longer=1.5"`` trains 1.5 times as long.
        recipe: The recipe to change.

    Returns:
        A key for folders, a label for tables, and the recipe.

    Raises:
        LabError: If the optimizer or a setting does not exist.
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
    """Refuse second-order options for a first-order optimizer.

    Args:
        recipe: The recipe to run.
        shared: Options that other optimizers of a comparison use.

    Raises:
        LabError: If an option has no effect.
    """
    if recipe.optimizer in ("base", "muon"):
        for name in recipe.options:
            if name not in shared:
                raise LabError(f"{name} means nothing to {recipe.optimizer}: leave it out")


def check_optimizer(recipe: Recipe) -> None:
    """Build the optimizer on the meta device, so that a comparison refuses wrong options at once.

    Raises:
        LabError: If an option of the network or of the optimizer is wrong.
    """
    with torch.device("meta"):  # takes neither memory nor time
        model = build(**recipe.model)
    make_optimizer(recipe, model, warmup=0)


def make_optimizer(
    recipe: Recipe, model: nn.Module, warmup: int, scaler: torch.amp.GradScaler | None = None
) -> Optimizer:
    """Build the optimizer of a recipe.

    Args:
        recipe: The recipe.
        model: The network; K-FAC, AdaBK and EVA watch its layers.
        warmup: Warm-up steps, which a schedule-free F handles itself.
        scaler: Loss scaler of fp16 training; K-FAC divides its statistics by the scale.

    Raises:
        LabError: If an option is wrong; the message is that of the library.
    """
    params = list(model.named_parameters())
    keywords: dict[str, Any] = {"lr": recipe.lr, **recipe.base_options}
    if recipe.base in _FUSED and params[0][1].device.type == "cuda":
        keywords.setdefault("fused", True)
    if recipe.schedule == "schedule-free":
        keywords.setdefault("warmup_steps", warmup)
    try:
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
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise LabError(one_line(error)) from error
