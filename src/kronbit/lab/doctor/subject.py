"""The optimizer that is examined: an import path and options, so that ranks can make their own."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from kronbit.lab.errors import LabError


@dataclass(frozen=True)
class Subject:
    """An optimizer by its path.

    Attributes:
        path: Such as ``kronbit.Shampoo`` or ``torch.optim.AdamW``.
        options: What it is built with.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def find(self) -> Any:
        """The class.

        Raises:
            LabError: If there is none.
        """
        module, _, name = self.path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise LabError(f"cannot import {self.path!r}: {error}") from None

    def make(self, params: Iterable[Any]) -> Optimizer:
        """An optimizer of some parameters."""
        made: Optimizer = self.find()(params, **self.options)
        return made


# Second order is in use from the second step on.
OURS = {"lr": 1e-2, "update_every": 1, "refresh_every": 2}


def subject_of(path: str, options: Mapping[str, Any]) -> Subject:
    """Ours with short intervals, others with what is given.

    Args:
        path: Of the class.
        options: That were asked for.
    """
    return Subject(path, {**(OURS if path.startswith("kronbit.") else {}), **options})
