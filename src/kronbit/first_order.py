"""F: the first-order optimizer that gets the preconditioned gradient, by name, class or path."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from kronbit.config import FORMAT_KEY, OPTIONS

BaseFactory: TypeAlias = Callable[..., Optimizer]


def _import(path: str, needed_for: str) -> BaseFactory:
    """The object at ``package.module.name``."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{needed_for}: cannot import {path!r}: {error}") from error
    if not callable(found):
        raise TypeError(f"{needed_for}: {path!r} is not a class; got {found!r}")
    return found  # type: ignore[no-any-return]


def _adamw8bit() -> BaseFactory:
    for module in ("bitsandbytes.optim", "torchao.optim"):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return _import(f"{module}.AdamW8bit", "base='adamw8bit'")
    raise ImportError(
        "base='adamw8bit' needs bitsandbytes or torchao: pip install bitsandbytes "
        "(or: pip install torchao)"
    )


def _schedulefree(name: str) -> BaseFactory:
    if importlib.util.find_spec("schedulefree") is None:
        raise ImportError("schedule-free bases need a package: pip install schedulefree")
    return _import(f"schedulefree.{name}", "a schedule-free base")


# Name -> (how to get the class, what it is built with unless told otherwise).
NAMES: Mapping[str, tuple[Callable[[], BaseFactory], Mapping[str, Any]]] = {
    "sgd": (lambda: torch.optim.SGD, {"momentum": 0.9}),
    "adam": (lambda: torch.optim.Adam, {}),
    "adamw": (lambda: torch.optim.AdamW, {}),
    "nadamw": (lambda: torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "adagrad": (lambda: torch.optim.Adagrad, {}),
    "rmsprop": (lambda: torch.optim.RMSprop, {}),
    "adamw8bit": (_adamw8bit, {}),
    "schedulefree-adamw": (lambda: _schedulefree("AdamWScheduleFree"), {}),
    "schedulefree-sgd": (lambda: _schedulefree("SGDScheduleFree"), {}),
}


def resolve(
    params: Optimizer | Iterable[Any], base: str | BaseFactory | None, options: Mapping[str, Any]
) -> Optimizer:
    """F: the optimizer that was given, or one built of ``base``, by default AdamW.

    Args:
        params: An optimizer, or parameters, param groups or named parameters.
        base: What to build; see ``build``.
        options: Keywords that are not ours.

    Raises:
        TypeError: If the arguments contradict each other, or F cannot work on given gradients.
    """
    if not isinstance(params, Optimizer):
        optimizer = build("adamw" if base is None else base, params, options)
    elif base is not None:
        raise TypeError(f"got an optimizer and base={base!r}: give one of them")
    elif options:
        raise TypeError(
            f"kronbit has no option {next(iter(options))!r}{_nearest(next(iter(options)), OPTIONS)}"
            f" (options of the base belong into the constructor of {type(params).__name__})"
        )
    else:
        optimizer = params
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the closure itself, several times per step, and would not see the "
            "preconditioned gradient: use another base"
        )
    if FORMAT_KEY in optimizer.param_groups[0]:
        raise TypeError(
            f"{type(optimizer).__name__} is wrapped in a kronbit optimizer already: "
            "gradients are preconditioned once"
        )
    return optimizer


def build(base: str | BaseFactory, params: Iterable[Any], options: Mapping[str, Any]) -> Optimizer:
    """Build F.

    Args:
        base: A name of ``NAMES``, an import path such as ``"torch.optim.RAdam"``, or a class.
        params: Parameters, param groups or named parameters.
        options: F's keywords: ``lr``, ``weight_decay``, ...

    Returns:
        The optimizer.

    Raises:
        ValueError: If a name is unknown.
        TypeError: If F does not know a keyword, or ``base`` is no optimizer class.
        ImportError: If a package is missing.
    """
    defaults: Mapping[str, Any] = {}
    if isinstance(base, str) and base.lower() in NAMES:
        find, defaults = NAMES[base.lower()]
        factory = find()
    elif isinstance(base, str):
        if not {".", ":"} & set(base):
            raise ValueError(
                f"base must be one of {', '.join(NAMES)}, an import path such as "
                f"'torch.optim.RAdam', a class or an optimizer; got {base!r}{_nearest(base, NAMES)}"
            )
        factory = _import(base, f"base={base!r}")
    elif callable(base):
        factory = base
    else:
        raise TypeError(f"base must be a name, an import path or a class; got {base!r}")
    _check_keywords(factory, options)
    optimizer = factory(params, **{**defaults, **options})
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"base={base!r} does not make a torch.optim.Optimizer; got {optimizer!r}")
    return optimizer


def _check_keywords(factory: BaseFactory, options: Mapping[str, Any]) -> None:
    """Refuse keywords that neither we nor F know, by name."""
    known = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in options:
        if name not in known:
            label = getattr(factory, "__name__", repr(factory))
            hint = _nearest(name, [*OPTIONS, *known])
            raise TypeError(f"neither kronbit nor {label} has an option {name!r}{hint}")


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
