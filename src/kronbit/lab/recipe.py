"""A recipe: everything that decides a training, in one flat file."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kronbit.config import OPTIONS
from kronbit.lab.errors import LabError
from kronbit.lab.named import refuse_unknown

FOLDER = Path(__file__).parent / "recipes"
OPTIMIZERS = ("base", "shampoo", "caspr", "kfac", "adabk", "eva", "mfac", "muon")
SCHEDULES = ("multistep", "cosine", "linear", "constant", "schedule-free")


@dataclass(frozen=True)
class Recipe:
    """The settings of a training.

    Attributes:
        name: What it is called.
        about: One line for the list of recipes.
        paper: The paper's table that it belongs to; empty for none.
        model: ``name``, and what ``kronbit.lab.models.build`` takes for it.
        data: ``name``, and what ``kronbit.lab.data.open_data`` takes for it.
        holdout: Share of the training set that is not trained on and takes the place of the
            held-out set in evaluations: for choices that must not be made on that set.
        epochs: Passes over the training set; give this or ``steps``.
        steps: Steps of the optimizer.
        batch: Examples per step, over all ranks.
        micro_batch: Examples per pass and rank; gradients are summed up until ``batch``.
        optimizer: ``base`` (alone), ``shampoo``, ``caspr``, ``kfac``, ``adabk``, ``eva``, ``mfac``,
            or ``muon`` (for hidden matrices, the base for the rest).
        base: F, as in ``kronbit.Shampoo``: ``adamw``, ``sgd``, ``nadamw``, an import path, ...
        lr: F's learning rate at its highest.
        base_options: F's other options.
        shampoo: Options of Shampoo and CASPR in this recipe.
        eigen: Further ones of their eigen method, the paper's.
        kfac: Options of K-FAC and AdaBK in this recipe.
        options: Options given to whichever optimizer runs; they win over the three above.
        schedule: ``multistep`` (a tenth after every 30 %), ``cosine`` and ``linear`` (to 0),
            ``constant``, ``schedule-free``.
        warmup: Share of the steps over which the learning rate rises linearly.
        warmup_epochs: Or how many epochs.
        clip: Largest norm of all gradients; ``None`` leaves them.
        dtype: Of the parameters, and so of F's states: ``fp32`` or ``bf16``.
        amp: Autocast of the forward pass: ``off``, ``bf16`` or ``fp16``.
        channels_last: Memory format of convolutional networks.
        deterministic: Whether gradients on a GPU are the same every time, so that a resumed run
            is; attention takes longer then.
        seed: Of the weights and of the data's order.
        log_every: Steps between lines of training loss; the host waits for the device there.
        eval_every: Steps between evaluations; ``None`` for 20 in all. There is one in the end.
        eval_batches: At most so many batches of held-out data; ``None`` for all.
        checkpoint_every: Steps between checkpoints; ``None`` for none but the last.
        keep: How many checkpoints stay.
        watched_blocks: Of how many blocks the quantisation error is followed.
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
            raise LabError("a recipe has epochs or steps: one of the two")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise LabError(f"{name} must be positive; got {value}")
        if self.watched_blocks < 0:
            raise LabError(f"watched_blocks must not be negative; got {self.watched_blocks}")
        if not 0 <= self.holdout < 1:
            raise LabError(f"holdout is a share from 0 to below 1; got {self.holdout}")
        if self.warmup and self.warmup_epochs:
            raise LabError("a recipe has warmup or warmup_epochs: one of the two")
        if not 0 <= self.warmup <= 1 or self.warmup_epochs < 0:
            raise LabError(
                f"warmup is a share from 0 to 1, warmup_epochs not negative; got {self.warmup} "
                f"and {self.warmup_epochs}"
            )
        if self.base.startswith("schedulefree") != (self.schedule == "schedule-free"):
            raise LabError(
                f"base={self.base} and schedule={self.schedule} do not go together: schedule-free "
                "bases want --set schedule=schedule-free, and only they do"
            )

    def second_order_options(self) -> dict[str, Any]:
        """The options of the optimizer that runs, besides F's."""
        found: dict[str, Any] = {}
        if self.optimizer in ("shampoo", "caspr"):
            found = {**self.shampoo}
            if self.options.get("method", self.shampoo.get("method")) == "eigen":
                found |= self.eigen
        elif self.optimizer in ("kfac", "adabk"):
            found = {**self.kfac}
        return {**found, **self.options}

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with other values.

        Args:
            settings: By name: a field of the recipe, ``model.NAME``, ``data.NAME``, an option of
                kronbit's optimizers, or one of F.

        Raises:
            LabError: If a name or a value is none.
        """
        changed: dict[str, Any] = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            if name and section in _SECTIONS:
                held = changed.get(section, getattr(self, section))
                changed[section] = {**held, name: value}
            elif key in ("steps", "epochs"):  # one replaces the other
                changed |= {"steps": None, "epochs": None, key: _typed(key, value)}
            elif key in ("warmup", "warmup_epochs"):
                changed |= {"warmup": 0.0, "warmup_epochs": 0.0, key: _typed(key, value)}
            elif key in _FIELDS and key not in _SECTIONS:
                changed[key] = _typed(key, value)
            elif key in OPTIONS or key in _BASELINE_OPTIONS:
                changed["options"] = {**changed.get("options", self.options), key: value}
            elif key in _SECTIONS:
                raise LabError(f"{key} has several settings: --set {key}.NAME=VALUE")
            else:
                close = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.8)
                if close:
                    raise LabError(f"there is no setting {key!r}; did you mean {close[0]!r}?")
                held = changed.get("base_options", self.base_options)
                changed["base_options"] = {**held, key: value}
        return replace(self, **changed)

    def to_mapping(self) -> dict[str, Any]:
        """All settings as plain values."""
        return asdict(self)

    def to_yaml(self) -> str:
        """All settings as a file that can be read again."""
        import yaml

        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True, width=100)


_FIELDS = tuple(own.name for own in fields(Recipe))
_SECTIONS = ("model", "data", "base_options", "shampoo", "eigen", "kfac", "options")
_POSITIVE = (
    *("epochs", "steps", "batch", "micro_batch", "lr", "clip", "log_every"),
    *("eval_every", "eval_batches", "checkpoint_every", "keep"),
)
_BASELINE_OPTIONS = ("gradients", "shared")  # of MFAC, and of K-FAC
_CHOICES = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "dtype": ("fp32", "bf16"),
    "amp": ("off", "bf16", "fp16"),
}


def _typed(name: str, value: Any) -> Any:
    """A value of the field's type: numbers may come as text, ``1e-3`` among them."""
    hint = typing.get_type_hints(Recipe)[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    try:
        for kind in kinds:
            if kind is bool and isinstance(value, bool):
                return value
            if kind is int and not isinstance(value, bool) and float(value) == int(float(value)):
                return int(float(value))
            if kind is float and not isinstance(value, bool):
                return float(value)
        if str in kinds:
            # YAML reads a bare off as no
            return "off" if value is False else str(value)
        if Mapping in {typing.get_origin(kind) for kind in kinds} and isinstance(value, Mapping):
            return dict(value)
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise LabError(f"{name} must be {wanted}; got {value!r}")


def parse_settings(given: Iterable[str]) -> dict[str, Any]:
    """``["lr=1e-3", "betas=[0.9, 0.95]"]`` as names and values.

    Raises:
        LabError: If an item is not ``key=value``.
    """
    import yaml

    found: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise LabError(f"a setting is key=value; got {item!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise LabError(f"cannot read the value of {item!r}: {reason}") from error
        found[key.strip()] = _number(value)
    return found


def _number(value: Any) -> Any:
    """YAML takes ``1e-3`` for text."""
    if isinstance(value, str):
        try:
            found = float(value)
        except ValueError:
            return value
        return int(found) if found.is_integer() and "." not in value else found
    if isinstance(value, list):
        return [_number(item) for item in value]
    return value


def recipe_names() -> list[str]:
    """The recipes that come with kronbit."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str) -> Recipe:
    """A recipe that comes with kronbit, or a YAML file.

    Args:
        name: ``pydoc-gpt``, or a path that ends in ``.yaml`` or ``.yml``.

    Raises:
        LabError: If there is none, or it is wrong.
    """
    path = FOLDER / f"{name}.yaml"
    if name not in recipe_names():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            close = difflib.get_close_matches(name, recipe_names(), n=3, cutoff=0.4)
            near = f"nearest: {', '.join(close)}; " if close else ""
            raise LabError(
                f"there is no recipe {name!r}; {near}`kronbit recipes` lists them, and a file of "
                "your own ends in .yaml"
            )
        if not path.is_file():
            raise LabError(f"there is no file {name}; `kronbit recipes show NAME` prints a start")
    return recipe_from(_read_yaml(path), path.stem, str(path) if path.parent != FOLDER else name)


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LabError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def recipe_from(found: Any, name: str, source: str) -> Recipe:
    """A recipe of the content of a file.

    Args:
        found: What was read.
        name: Its name, unless it has one inside.
        source: What to call it in errors.

    Raises:
        LabError: If it is not a recipe.
    """
    if not isinstance(found, Mapping):
        raise LabError(f"{source} is not a recipe: it has no `key: value` lines")
    refuse_unknown(f"a setting of a recipe ({source})", map(str, found), _FIELDS)
    missing = [key for key in ("model", "data") if key not in found]
    if missing:
        raise LabError(f"{source}: {missing[0]} is missing")
    named = {"name": name, "about": "", **found}
    try:
        typed = {key: _typed(key, _numbers_in(value)) for key, value in named.items()}
        return Recipe(**typed)
    except LabError as error:
        raise LabError(f"{source}: {error}") from error


def _numbers_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers_in(item) for key, item in value.items()}
    return _number(value)
