"""The optimizer under test: an import path and options, from which any process can build it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kronbit.lab.errors import lab_error
from kronbit.optimizer import SecondOrder


@dataclass(frozen=True)
class Subject:
    """An optimizer class and its options.

    Attributes:
        path: Import path, such as ``kronbit.Shampoo`` or ``torch.optim.AdamW``.
        options: Keyword arguments of the class.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def find(self) -> Any:
        """Import the class.

        Raises:
            LabError: If the import fails.
        """
        with lab_error(f"cannot import {self.path!r}", Exception):  # importing can raise anything
            return pkgutil.resolve_name(self.path)

    def make(self, model: nn.Module, params: Iterable[Any] | None = None) -> Optimizer:
        """Build the optimizer for all parameters of a model, or for ``params``."""
        kind = self.find()
        options = {"model": model, **self.options} if _takes_model(kind) else self.options
        made: Optimizer = kind(model.parameters() if params is None else params, **options)
        return made


def _takes_model(kind: Any) -> bool:
    """True if a constructor of the class, or of a class it inherits from, takes ``model``."""
    makers = kind.__mro__[:-1] if isinstance(kind, type) else [kind]
    return any("model" in signature(make).parameters for make in makers)


# Intervals so short that preconditioning takes effect from the second step.
SHORT_INTERVALS = {"lr": 1e-2, "update_every": 1, "refresh_every": 2}


def subject_of(path: str, options: Mapping[str, Any]) -> Subject:
    """Return the subject of a class; kronbit's optimizers and their subclasses get short intervals.

    Args:
        path: Import path of the class.
        options: Options given by the user.

    Raises:
        LabError: If the import fails.
    """
    kind = Subject(path, options).find()
    second_order = isinstance(kind, type) and issubclass(kind, SecondOrder)
    return Subject(path, {**(SHORT_INTERVALS if second_order else {}), **options})
