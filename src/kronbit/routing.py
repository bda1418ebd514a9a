"""Param groups: which parameters are preconditioned, with which options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit.base import tensors_of
from kronbit.config import FORMAT, FORMAT_KEY, GROUP_OPTIONS, STATISTICS_KEY, Config
from kronbit.distributed.sharding import refuse
from kronbit.kernels.cache import BoundedCache
from kronbit.messages import NamedParameter, named_parameters, parameter_name
from kronbit.statistics.base import Statistics

# Names of the two matrices of a low-rank update in peft, torchtune and kohya's scripts.
_LOW_RANK = re.compile(r"(^|\.)lora_")
_VALUES = itemgetter(*GROUP_OPTIONS)


def param_groups(
    model: nn.Module,
    skip: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
    low_rank_order: int | None = None,
) -> list[dict[str, Any]]:
    """Return the named parameters of a model in groups; skipped ones have ``precondition=False``.

    A weight that several modules share is skipped if any of these modules is: skipping
    ``nn.Embedding`` also skips a head that is tied to it.

    Example::

        opt = Shampoo(kronbit.param_groups(model, skip=(nn.Embedding, "lm_head.*")), lr=1e-3)

    Args:
        model: The model.
        skip: Patterns of parameter names (with ``*`` and ``?``), and module classes. Parameters
            that match a pattern or belong to such a module are left to the base optimizer.
        low_rank_order: ``max_order`` of LoRA's matrices, ``r x n`` and ``m x r``, which then form a
            separate group: a statistic of order n is far larger than they are. ``None``: the same
            as for all other parameters. (K-FAC and AdaBK do not cut matrices.)

    Returns:
        Up to three groups. Options may be added to them.

    Raises:
        TypeError: If an item of ``skip`` is neither a pattern nor a module class.
        ValueError: If an item of ``skip`` matches no parameter of the model.
    """
    skipped: set[Tensor] = set()
    for pattern in [skip] if isinstance(skip, (str, type)) else skip:
        skipped |= _matching(model, pattern)
    plain, low_rank, left_out = [], [], []
    for name, p in model.named_parameters():
        if p in skipped:
            left_out.append((name, p))
        elif low_rank_order is not None and _LOW_RANK.search(name):
            low_rank.append((name, p))
        else:
            plain.append((name, p))
    groups: list[dict[str, Any]] = [
        {"params": plain},
        {"params": low_rank, "max_order": low_rank_order},
        {"params": left_out, "precondition": False},
    ]
    return [group for group in groups if group["params"]]


def _matching(model: nn.Module, pattern: str | type[nn.Module]) -> set[Tensor]:
    """Return the parameters that match a pattern, or belong to modules of a class."""
    matches: set[Tensor]
    if isinstance(pattern, str):
        # A shared weight has several names.
        names = model.named_parameters(remove_duplicate=False)
        matches = {p for name, p in names if fnmatchcase(name, pattern)}
    elif isinstance(pattern, type) and issubclass(pattern, nn.Module):
        modules = (module for module in model.modules() if isinstance(module, pattern))
        matches = {p for module in modules for p in module.parameters()}
    else:
        raise TypeError(f"skip takes name patterns and module classes; got {pattern!r}")
    if not matches:
        examples = ", ".join(name for name, _ in list(model.named_parameters())[:3])
        label = repr(pattern) if isinstance(pattern, str) else pattern.__name__
        raise ValueError(
            f"skip: {label} matches no parameter of the model; its names are like {examples}"
        )
    return matches


class ParamGroups:
    """The param groups of F with their options. Equal options share one ``Config`` object.

    Args:
        base: F, which holds the list of groups.
        config: The optimizer's options, which a group may override.
        statistics: Determines how a parameter is cut.

    Attributes:
        defaults: The entries of a param group that overrides nothing.
    """

    def __init__(self, base: Optimizer, config: Config, statistics: Statistics) -> None:
        self._base, self._config, self._statistics = base, config, statistics
        options = {name: getattr(config, name) for name in GROUP_OPTIONS}
        self.defaults = {**options, FORMAT_KEY: FORMAT, STATISTICS_KEY: statistics.name}
        self._known: BoundedCache[Any, Config] = BoundedCache(1)  # by option values, and configs

    def config_of(self, group: Mapping[str, Any]) -> Config:
        """Return the options of a group."""
        try:
            return self._known[_VALUES(group)]
        except (KeyError, TypeError):  # a new group, a missing option, or an unhashable value
            config = self._config.for_group(group)
        # Two keys for each group, and as many old ones, which schedules leave behind.
        self._known.size = 4 * len(self._base.param_groups)
        config = self._known.obtain(config, lambda: config)
        with suppress(KeyError, TypeError):
            self._known.obtain(_VALUES(group), lambda: config)
        return config

    def complete(self) -> None:
        """Add the defaults to new groups and to groups that F has loaded."""
        for group in self._base.param_groups:
            if FORMAT_KEY not in group:
                for name, value in self.defaults.items():
                    group.setdefault(name, value)

    def named(self) -> list[NamedParameter]:
        """Return each parameter once, with its name and options."""
        return named_parameters(self._base.param_groups, self.config_of)

    def name(self, p: Tensor) -> str:
        """Return the name of a parameter, for messages."""
        return next((name for name, other, _ in self.named() if other is p), "a parameter")

    def adopt(self) -> None:
        """Tell the statistics which parameters may be preconditioned."""
        groups = [g for g in self._base.param_groups if self._config.for_group(g).precondition]
        self._statistics.adopt([p for group in groups for p in group["params"]])

    def check(self) -> None:
        """Refuse invalid options and parameters of all groups; see ``check_new``."""
        for index, group in enumerate(self._base.param_groups):
            self._check(group, self._base.param_groups[:index])

    def check_new(self, group: Mapping[str, Any]) -> None:
        """Refuse invalid options, and options that do not suit the parameters of a new group."""
        self._check(group, self._base.param_groups)

    def _check(self, group: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> None:
        if not isinstance(group, Mapping):
            raise TypeError(f"a param group must be a dict; got {type(group).__name__}")
        options = self._config.for_group(group)
        known = [p for g in earlier if self._config.for_group(g).precondition for p in g["params"]]
        for number, p in enumerate(tensors_of(group)):
            if isinstance(p, Tensor):
                if options.precondition:
                    name = parameter_name(group, len(earlier), number)
                    refuse(name, p, self._statistics.takes_shards, known)
                    known.append(p)
                self._statistics.route(p, options)
