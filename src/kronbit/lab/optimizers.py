"""Optimizers by name: what a recipe runs, and what a comparison compares."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kronbit.algorithms import CASPR, KFAC, AdaBK, Shampoo
from kronbit.baselines import EVA, MFAC
from kronbit.config import Config
from kronbit.first_order import resolve
from kronbit.lab.errors import LabError
from kronbit.lab.models import build
from kronbit.lab.muon import MuonBesideBase
from kronbit.lab.named import refuse_unknown
from kronbit.lab.recipe import OPTIMIZERS, Recipe, parse_settings

_FUSED = ("sgd", "adam", "adamw")  # whose fused kernels are the fastest way on a GPU

# Members of a comparison: settings of the recipe by name.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "base": {"optimizer": "base"},
    **{
        f"{name}-{key}": {"optimizer": name, **options}
        for name in ("shampoo", "caspr")
        for key, options in (
            ("32", {"bits": 32}),
            ("4-naive", {"bits": 4, "method": "naive", "storage": "paper"}),
            ("4-paper", {"bits": 4, "method": "eigen", "storage": "paper"}),
            ("4", {"bits": 4}),
            ("8", {"bits": 8}),
        )
    },
    **{
        f"{name}-{bits}": {"optimizer": name, "bits": bits}
        for name in ("kfac", "adabk")
        for bits in (32, 4)
    },
    **{
        f"{name}-4-paper": {"optimizer": name, "bits": 4, "method": "eigen", "storage": "paper"}
        for name in ("kfac", "adabk")
    },
    "eva": {"optimizer": "eva"},
    "mfac": {"optimizer": "mfac"},
    "muon": {"optimizer": "muon"},
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


_LABELS = {"shampoo": "Shampoo", "caspr": "CASPR", "kfac": "K-FAC", "adabk": "AdaBK"}
_BASELINES = {"eva": "EVA", "mfac": "M-FAC"}


def label_of(recipe: Recipe) -> str:
    """What its optimizer is called in tables: "AdamW", "+ 4-bit Shampoo (paper)"."""
    if recipe.optimizer == "base":
        return BASE_LABELS.get(recipe.base, recipe.base.rpartition(".")[2])
    if recipe.optimizer == "muon":
        return "Muon"
    if recipe.optimizer in _BASELINES:
        return f"+ {_BASELINES[recipe.optimizer]}"
    options = recipe.second_order_options()
    method = options.get("method")
    how = "paper" if method == "eigen" and options.get("storage") == "paper" else method
    label = f"+ {options.get('bits', Config.bits)}-bit {_LABELS[recipe.optimizer]}"
    return f"{label} ({how})" if how else label


def variant(spec: str, recipe: Recipe) -> tuple[str, str, Recipe]:
    """One member of a comparison.

    Args:
        spec: A key of ``VARIANTS`` or a name of an optimizer, and settings after it, as in
            ``"shampoo-4 beta=0.9 lr=2e-3"``; ``"base longer=1.5"`` runs 1.5 times as long.
        recipe: What they start from.

    Returns:
        A key for folders, a label for tables, and the recipe.

    Raises:
        LabError: If there is no such optimizer, or it does not have such a setting.
    """
    name, *given = shlex.split(spec) or [""]
    refuse_unknown("an optimizer", [name], [*VARIANTS, *OPTIMIZERS])
    settings = parse_settings(given)
    longer = settings.pop("longer", 1)
    if not (isinstance(longer, (int, float)) and longer > 0):
        raise LabError(f"longer must be a positive number; got {longer!r}")
    made = recipe.with_settings({**VARIANTS.get(name, {"optimizer": name}), **settings})
    refuse_meaningless(made, recipe.options)
    if longer != 1:
        length = {"epochs": made.epochs * longer} if made.epochs else {}
        made = made.with_settings(length or {"steps": round((made.steps or 0) * longer)})
    label = label_of(made)
    for text in given:
        if name == "base" and text.startswith("base="):
            continue  # that is what the label says
        label += f", {text.removeprefix('longer=')} x as long" if "longer=" in text else f", {text}"
    return "-".join([name, *given]).replace("/", "_"), label, made


def refuse_meaningless(recipe: Recipe, shared: Mapping[str, Any] | None = None) -> None:
    """Refuse options of second order where there is none.

    Args:
        recipe: What is to run.
        shared: Options that are for other members of a comparison as well.

    Raises:
        LabError: If there is one.
    """
    if recipe.optimizer in ("base", "muon"):
        for name in recipe.options:
            if name not in (shared or {}):
                raise LabError(f"{name} means nothing to {recipe.optimizer}: leave it out")


def check_optimizer(recipe: Recipe) -> None:
    """Refuse now what the optimizer would refuse when its run begins, hours later in a comparison.

    Raises:
        LabError: If an option of the network or of the optimizer is wrong.
    """
    options = dict(recipe.model)
    with torch.device("meta"):  # no memory, and no time
        model = build(options.pop("name"), **options)
    make_optimizer(recipe, model, warmup=0)


def make_optimizer(
    recipe: Recipe,
    model: nn.Module,
    warmup: int,
    scaler: torch.amp.GradScaler | None = None,
) -> Optimizer:
    """The optimizer of a recipe.

    Args:
        recipe: Its settings.
        model: Whose parameters; K-FAC, AdaBK and EVA watch its layers.
        warmup: Steps of rise, which a schedule-free F makes itself.
        scaler: Of fp16 training, whose scale K-FAC's statistics must be freed of.

    Raises:
        LabError: If an option is wrong; the message is the library's.
    """
    params = list(model.named_parameters())
    keywords: dict[str, Any] = {"lr": recipe.lr, **recipe.base_options}
    if recipe.base in _FUSED and params[0][1].device.type == "cuda":
        keywords = {"fused": True, **keywords}
    if recipe.schedule == "schedule-free":
        keywords = {"warmup_steps": warmup, **keywords}
    options = recipe.second_order_options()
    try:
        if recipe.optimizer == "base":
            return resolve(params, recipe.base, keywords)
        if recipe.optimizer == "muon":
            return MuonBesideBase(model, recipe.base, keywords)
        keywords |= {"base": recipe.base, **options}
        if recipe.optimizer in ("shampoo", "caspr"):
            kind = Shampoo if recipe.optimizer == "shampoo" else CASPR
            return kind(params, **keywords)
        if recipe.optimizer in ("kfac", "adabk"):
            of_layers = KFAC if recipe.optimizer == "kfac" else AdaBK
            return of_layers(params, model=model, grad_scaler=scaler, **keywords)
        if recipe.optimizer == "eva":
            return EVA(params, model=model, **keywords)
        return MFAC(params, **keywords)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise LabError(" ".join(str(error).split())) from error
