"""The options of param groups, looked up once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any

from kronbit.config import GROUP_OPTIONS, Config

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
