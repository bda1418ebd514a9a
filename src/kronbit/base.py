"""Construction and wrapping of F, the first-order optimizer that takes the step."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit.config import FORMAT_KEY, OPTIONS

BaseFactory: TypeAlias = Callable[..., Optimizer]

# Options that select an implementation and do not change F's state. The meta device has only the
# default implementation.
IMPLEMENTATION = ("fused", "foreach", "capturable")


def _import(path: str, needed_for: str) -> BaseFactory:
    """Import the object at ``package.module.name``."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"{needed_for}: cannot import {path!r}: {error}") from error
    if not callable(factory):
        raise TypeError(f"{needed_for}: {path!r} is not a class; got {factory!r}")
    return factory  # type: ignore[no-any-return]


def _adamw8bit() -> BaseFactory:
    reasons = []
    for package in ("bitsandbytes", "torchao"):
        if importlib.util.find_spec(package) is None:
            reasons.append(f"{package} is not installed (pip install {package})")
            continue
        try:
            return _import(f"{package}.optim.AdamW8bit", "base='adamw8bit'")
        except Exception as error:  # a broken installation may raise any error
            reasons.append(f"{package} cannot be imported ({error})")
    raise ImportError(f"base='adamw8bit' needs bitsandbytes or torchao: {'; '.join(reasons)}")


def _schedulefree(name: str) -> BaseFactory:
    if importlib.util.find_spec("schedulefree") is None:
        raise ImportError(f"{name} needs the package schedulefree: pip install schedulefree")
    return _import(f"schedulefree.{name}", "a schedule-free base")


# Name -> (function that returns the class, default options).
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
    params: Optimizer | Iterable[Any] | None,
    base: str | BaseFactory | Optimizer | None,
    options: Mapping[str, Any],
) -> Optimizer:
    """Return F: the given optimizer, or a new one built from ``base``, by default AdamW.

    Args:
        params: An optimizer, or parameters, param groups or named parameters.
        base: An optimizer of ``params``, or the name, class or import path of one to build.
        options: Keywords that are not options of kronbit.

    Raises:
        TypeError: If arguments contradict each other, a keyword is unknown, or F cannot be wrapped.
        ValueError: If a name is unknown.
        ImportError: If a package is missing.
    """
    if isinstance(params, Optimizer):
        if base is not None:
            raise TypeError(f"got an optimizer and base={base!r}: pass only one of them")
        params, base = None, params
    if isinstance(base, Optimizer):
        if options:
            name = next(iter(options))
            raise TypeError(
                f"kronbit has no option {name!r}{_nearest(name, OPTIONS)} (options of the base "
                f"belong in the constructor of {type(base).__name__})"
            )
        if params is not None and not _same_parameters(params, base):
            raise TypeError(
                f"base={type(base).__name__} does not optimize the given parameters: omit params"
            )
        optimizer = base
    elif params is None:
        raise TypeError("pass parameters, or an optimizer that has them")
    else:
        optimizer = _build("adamw" if base is None else base, params, options)
    _check(optimizer)
    return optimizer


def tensors_of(group: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a group as given by a user: one or several, named or not."""
    params = group["params"]
    items = [params] if isinstance(params, Tensor) else params
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _same_parameters(params: Iterable[Any], optimizer: Optimizer) -> bool:
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    ids = {id(p) for group in groups for p in tensors_of(group)}
    return ids == {id(p) for group in optimizer.param_groups for p in group["params"]}


def _check(optimizer: Optimizer) -> None:
    """Refuse an F that cannot be wrapped."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the closure itself, several times per step, and would not see the "
            "preconditioned gradient: use another base"
        )
    if any(FORMAT_KEY in group for group in optimizer.param_groups):
        raise TypeError(
            f"{name} is already wrapped in a kronbit optimizer, and gradients must not be "
            f"preconditioned twice: build a new {name}"
        )
    clash = sorted(set(OPTIONS) & optimizer.defaults.keys())
    if clash:
        raise TypeError(
            f"{name} has an option {clash[0]!r} in its param groups, which is also the name of an "
            "option of kronbit: use another base"
        )


def _build(base: str | BaseFactory, params: Iterable[Any], options: Mapping[str, Any]) -> Optimizer:
    factory, defaults = _factory(base)
    if inspect.isclass(factory) and not issubclass(factory, Optimizer):
        raise TypeError(f"base={base!r} is not a torch.optim.Optimizer")
    _check_keywords(factory, options)
    optimizer = factory(params, **{**defaults, **options})
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"base={base!r} does not return a torch.optim.Optimizer; got {optimizer!r}")
    return optimizer


def _factory(base: str | BaseFactory) -> tuple[BaseFactory, Mapping[str, Any]]:
    """Return F's class and default options, given a name, an import path, or a class."""
    if isinstance(base, str) and base.lower() in NAMES:
        find, defaults = NAMES[base.lower()]
        return find(), defaults
    if isinstance(base, str):
        if not {".", ":"} & set(base):
            raise ValueError(
                f"base must be one of {', '.join(NAMES)}, an import path such as "
                f"'torch.optim.RAdam', a class or an optimizer; got {base!r}{_nearest(base, NAMES)}"
            )
        return _import(base, f"base={base!r}"), {}
    if callable(base):
        return base, {}
    raise TypeError(f"base must be a name, an import path, a class or an optimizer; got {base!r}")


def _check_keywords(factory: BaseFactory, options: Mapping[str, Any]) -> None:
    """Refuse keywords that are options of neither kronbit nor F."""
    known = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in options:
        if name not in known:
            label = getattr(factory, "__name__", repr(factory))
            hint = _nearest(name, [*OPTIONS, *known])
            raise TypeError(f"neither kronbit nor {label} has an option {name!r}{hint}")


def _nearest(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _step_without_hooks(optimizer: Optimizer) -> None:
    """Take a step without torch's global optimizer hooks, since it is not part of training."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch has wrapped the method of the class
        step = step.__wrapped__
    step(optimizer)


def state_on_meta(
    factory: BaseFactory, groups: Sequence[Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return F's state after a step on the meta device, which takes no memory.

    If F cannot run there, its error is raised.

    Returns:
        The state of each parameter, by its index across all groups.
    """
    meta_params: list[Tensor] = []
    meta_groups = []
    for group in groups:
        params = []
        for p in group["params"]:
            params.append(nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=True))
            params[-1].grad = torch.empty_like(params[-1])
        meta_params += params
        dropped = (*IMPLEMENTATION, "param_names")
        plain = {name: value for name, value in group.items() if name not in dropped}
        if isinstance(plain.get("lr"), Tensor):
            plain["lr"] = 1e-3
        meta_groups.append({**plain, "params": params})
    optimizer = factory(meta_groups)
    if hasattr(optimizer, "train"):  # schedule-free
        optimizer.train()
    _step_without_hooks(optimizer)
    return {i: dict(optimizer.state.get(p, {})) for i, p in enumerate(meta_params)}


class Wrapper(Optimizer):
    """An optimizer that wraps a first-order optimizer F, which takes the step.

    Attributes:
        base: F; ``param_groups`` is F's list.
    """

    base: Optimizer

    def _state_dict_to_load(self, state_dict: Any) -> dict[str, Any]:
        """Return a shallow copy of a state dict, after the pre-hooks have run."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"a state dict must be a dict; got {type(state_dict).__name__}")
        given: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = pre_hook(self, given) or given
        return given

    # Schedulers, scalers and trainers may read, change and replace the param groups of either
    # optimizer.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """F's list of param groups, not a copy."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    def train(self) -> None:
        """Switch a schedule-free F to training mode; other optimizers have no modes."""
        if hasattr(self.base, "train"):
            self.base.train()

    def eval(self) -> None:
        """Switch a schedule-free F to evaluation mode; other optimizers have no modes."""
        if hasattr(self.base, "eval"):
            self.base.eval()
