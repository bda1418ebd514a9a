"""The options of param groups: looked up once, and checked against parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from torch import Tensor

from kronbit.config import GROUP_OPTIONS, Config
from kronbit.distributed.placements import refuse
from kronbit.first_order import tensors_of
from kronbit.report import parameter_name
from kronbit.statistics import Statistics

_VALUES = itemgetter(*GROUP_OPTIONS)


class GroupConfigs:
    """Options by group: the same object as long as they are equal.

    Args:
        config: The optimizer's own.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[Any, Config] = {}  # by themselves, and by a group's values

    def __len__(self) -> int:
        return len(self._known)

    def of(self, group: Mapping[str, Any], groups: int) -> Config:
        """The options of a group, of which there are so many."""
        try:
            return self._known[_VALUES(group)]
        except (KeyError, TypeError):  # not seen yet; one is missing, or is a list
            config = self._config.for_group(group)
        if len(self._known) > 4 * groups:
            self._known.clear()  # of numbers that a schedule has left behind
        config = self._known.setdefault(config, config)
        with suppress(KeyError, TypeError):
            self._known[_VALUES(group)] = config
        return config


def check_group(
    group: Mapping[str, Any],
    earlier: Sequence[Mapping[str, Any]],
    config: Config,
    statistics: Statistics,
) -> None:
    """Refuse bad options, and options that do not suit the group's parameters.

    Args:
        group: The group, of which options may be missing.
        earlier: Those before it.
        config: The optimizer's own options.
        statistics: They know how a parameter is cut.

    Raises:
        TypeError: If it is not a dict.
        ValueError: If an option or a parameter is refused; by name.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"a param group must be a dict; got {type(group).__name__}")
    own = config.for_group(group)
    known = [p for g in earlier if config.for_group(g).precondition for p in g["params"]]
    for number, p in enumerate(tensors_of(group)):
        if isinstance(p, Tensor):
            if own.precondition:
                name = parameter_name(group, len(earlier), number)
                refuse(name, p, statistics.takes_shards, known)
                known.append(p)
            statistics.route(p, own)
