"""A recipe: all settings that determine the results of a training run, in one file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kronbit.config import OPTIONS
from kronbit.lab.errors import LabError, lab_error, refuse_unknown
from kronbit.lab.precision import AMP, DTYPES

FOLDER = Path(__file__).parent / "recipes"
OPTIMIZERS = ("base", "shampoo", "caspr", "kfac", "adabk", "eva", "mfac", "muon")
SCHEDULES = ("multistep", "cosine", "linear", "constant", "schedule-free")


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run.

    Attributes:
        name: Name of the recipe.
        about: One line for the list of recipes.
        paper: Table of the paper that the recipe reproduces, if any.
        model: ``name``, and the arguments of ``kronbit.lab.models.build``.
        data: ``name``, and the options of that data set in ``kronbit.lab.data``.
        holdout: Share of the training set that is held out. Evaluations use it instead of the
            regular held-out set, which must not influence the choice of settings.
        epochs: Passes over the training set; alternative to ``steps``.
        steps: Steps of the optimizer.
        batch: Examples per step, over all ranks.
        micro_batch: Examples per pass and rank; gradients are accumulated up to ``batch``.
        optimizer: ``base`` (alone), ``shampoo``, ``caspr``, ``kfac``, ``adabk``, ``eva``, ``mfac``,
            or ``muon`` (for hidden matrices, with the base for all other parameters).
        base: F, as in ``kronbit.Shampoo``: ``adamw``, ``sgd``, ``nadamw``, an import path, ...
        lr: Maximum learning rate of F.
        base_options: Other options of F.
        shampoo: Options of Shampoo and CASPR.
        eigen: Additional options if their method is ``eigen``, the paper's.
        kfac: Options of K-FAC and AdaBK.
        options: Options of any second-order optimizer; they override the previous three.
        schedule: ``multistep`` (divided by 10 after every 30 %), ``cosine`` and ``linear`` (to 0),
            ``constant`` or ``schedule-free``.
        warmup: Share of the steps over which the learning rate rises linearly.
        warmup_epochs: The same as a number of epochs.
        clip: Maximum norm of all gradients; ``None`` for no clipping.
        dtype: Dtype of parameters, and therefore of F's state: ``fp32`` or ``bf16``.
        amp: Autocast of the forward pass: ``off``, ``bf16`` or ``fp16``.
        channels_last: True for channels-last memory format of convolutional networks.
        deterministic: True for deterministic gradients on a GPU, so that a resumed run equals an
            uninterrupted one. Attention is slower.
        seed: Seed of the weights and of the order of data.
        log_every: Steps between logged training losses. Logging makes the host wait for the
            device.
        eval_every: Steps between evaluations; ``None`` for 20 in all. The last step is always
            evaluated.
        eval_batches: Maximum number of batches per evaluation; ``None`` for all.
        checkpoint_every: Steps between checkpoints; ``None`` for a final one only.
        keep: Number of checkpoints that are kept.
        watched_blocks: Number of blocks whose quantisation error is recorded.
    """

    name: str
    about: str
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    paper: str = ""
    holdout: float = 0.0
    epochs: float | None = None
    steps: int | None = None
    batch: int = 128
    micro_batch: int | None = None
    optimizer: str = "shampoo"
    base: str = "adamw"
    lr: float = 1e-3
    base_options: Mapping[str, Any] = field(default_factory=dict)
    shampoo: Mapping[str, Any] = field(default_factory=dict)
    eigen: Mapping[str, Any] = field(default_factory=dict)
    kfac: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "cosine"
    warmup: float = 0.0
    warmup_epochs: float = 0.0
    clip: float | None = None
    dtype: str = "fp32"
    amp: str = "off"
    channels_last: bool = False
    deterministic: bool = True
    seed: int = 0
    log_every: int = 50
    eval_every: int | None = None
    eval_batches: int | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    watched_blocks: int = 4

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            refuse_unknown(name, [getattr(self, name)], allowed)
        for name in ("model", "data"):
            if "name" not in getattr(self, name):
                raise LabError(f"{name} needs a name: {name}: {{name: ...}}")
        if (self.epochs is None) == (self.steps is None):
            raise LabError("give a recipe either epochs or steps")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise LabError(f"{name} must be positive; got {value}")
        if self.watched_blocks < 0:
            raise LabError(f"watched_blocks must not be negative; got {self.watched_blocks}")
        if not 0 <= self.holdout < 1:
            raise LabError(f"holdout must be at least 0 and below 1; got {self.holdout}")
        if self.warmup and self.warmup_epochs:
            raise LabError("give a recipe either warmup or warmup_epochs")
        if not 0 <= self.warmup <= 1 or self.warmup_epochs < 0:
            raise LabError(
                f"warmup must be a share from 0 to 1, and warmup_epochs must not be negative; got "
                f"{self.warmup} and {self.warmup_epochs}"
            )
        if self.base.startswith("schedulefree") != (self.schedule == "schedule-free"):
            raise LabError(
                f"base={self.base} does not work with schedule={self.schedule}: schedule-free "
                "bases need --set schedule=schedule-free, and no other base does"
            )

    def second_order_options(self) -> dict[str, Any]:
        """Return the options of the second-order optimizer, without those of F."""
        options = dict(self.options)
        if self.optimizer in ("shampoo", "caspr"):
            eigen = {**self.shampoo, **options}.get("method") == "eigen"
            return {**self.shampoo, **(self.eigen if eigen else {}), **options}
        return {**self.kfac, **options} if self.optimizer in ("kfac", "adabk") else options

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """Return a recipe with other values.

        A name is a field, ``model.NAME``, ``data.NAME``, or an option of kronbit's optimizers or
        of F.
        """
        changed: dict[str, Any] = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            if key in _SECTIONS:
                raise LabError(f"{key} has several settings: --set {key}.NAME=VALUE")
            if key not in _FIELDS and not (name and section in _SECTIONS):
                close = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.8)
                second_order = key in OPTIONS or key in _BASELINE_OPTIONS
                if close and not second_order:
                    raise LabError(f"there is no setting {key!r}; did you mean {close[0]!r}?")
                section, name = "options" if second_order else "base_options", key
            if name:
                changed[section] = {**changed.get(section, getattr(self, section)), name: value}
            else:
                if key in _OTHER:
                    changed[_OTHER[key]] = getattr(Recipe, _OTHER[key])  # the default
                changed[key] = _typed(key, value)
        return replace(self, **changed)

    def to_yaml(self) -> str:
        """Return all settings as a YAML file."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=100)


_FIELDS = {field.name: str(field.type) for field in fields(Recipe)}
_SECTIONS = [name for name, kind in _FIELDS.items() if kind.startswith("Mapping")]
# Pairs of names for one thing: setting one resets the other to its default.
_OTHER = {"steps": "epochs", "warmup": "warmup_epochs"}
_OTHER |= {second: first for first, second in _OTHER.items()}
_POSITIVE = (
    *("epochs", "steps", "batch", "micro_batch", "lr", "clip", "log_every"),
    *("eval_every", "eval_batches", "checkpoint_every", "keep"),
)
_BASELINE_OPTIONS = ("gradients", "shared")  # of M-FAC and of K-FAC
_CHOICES = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "dtype": DTYPES, "amp": AMP}


def _typed(name: str, value: Any) -> Any:
    """Convert a value to the type of a field. Numbers may be text, such as ``1e-3``."""
    kind, _, optional = _FIELDS[name].partition(" | ")
    if value is None and optional:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        match kind:
            case "str":
                return "off" if value is False else str(value)  # YAML reads a bare off as False
            case "int" if not isinstance(value, bool) and float(value).is_integer():
                return int(float(value))
            case "float" if not isinstance(value, bool):
                return float(value)
            case "bool" if isinstance(value, bool):
                return value
            case "Mapping[str, Any]" if isinstance(value, Mapping):
                return dict(value)
    wanted = kind.partition("[")[0] + (" or null" if optional else "")
    raise LabError(f"{name} must be {wanted}; got {value!r}")


def parse_settings(given: Iterable[str]) -> dict[str, Any]:
    """Parse settings such as ``["lr=1e-3", "betas=[0.9, 0.95]"]`` into names and values."""
    settings: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise LabError(f"a setting must be key=value; got {item!r}")
        with lab_error(f"cannot read the value of {item!r}", yaml.YAMLError):
            settings[key.strip()] = _number(yaml.safe_load(text))
    return settings


def _number(value: Any) -> Any:
    """Convert text to numbers, also in lists and mappings: YAML reads ``1e-3`` as text."""
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            return int(number) if number.is_integer() and "." not in value else number
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _number(item) for key, item in value.items()}
    return value


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with kronbit."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str) -> Recipe:
    """Return a recipe that comes with kronbit, such as ``pydoc-gpt``, or read a YAML file."""
    path = FOLDER / f"{name}.yaml"
    if name not in recipe_names():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            close = difflib.get_close_matches(name, recipe_names(), n=3, cutoff=0.4)
            near = f"nearest: {', '.join(close)}; " if close else ""
            raise LabError(
                f"there is no recipe {name!r}; {near}`kronbit recipes` lists them. The name of a "
                "recipe file must end in .yaml"
            )
        if not path.is_file():
            raise LabError(f"there is no file {name}; `kronbit recipes show NAME` prints one")
    with lab_error(f"cannot read {path}", OSError, UnicodeDecodeError, yaml.YAMLError):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return recipe_from(content, path.stem, name)


def recipe_from(content: Any, name: str, source: str) -> Recipe:
    """Make a recipe from a file's content, by default with this name. Errors name ``source``."""
    if not isinstance(content, Mapping):
        raise LabError(f"{source} is not a recipe: it has no `key: value` lines")
    refuse_unknown(f"a setting of a recipe ({source})", map(str, content), _FIELDS)
    named = {"name": name, "about": "", "model": {}, "data": {}, **content}
    with lab_error(source, LabError):
        return Recipe(**{key: _typed(key, _number(value)) for key, value in named.items()})
