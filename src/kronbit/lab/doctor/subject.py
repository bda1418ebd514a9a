"""The optimizer that is examined: an import path and options, so that ranks can make their own."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kronbit.lab.errors import LabError
from kronbit.optimizer import SecondOrder


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
        try:
            return pkgutil.resolve_name(self.path)
        except Exception as error:  # of a package of the user's: anything
            raise LabError(f"cannot import {self.path!r}: {error}") from None

    def make(self, model: nn.Module, params: Iterable[Any] | None = None) -> Optimizer:
        """An optimizer of a model's parameters, or of some of them."""
        kind = self.find()
        model_option: dict[str, Any] = {"model": model} if _takes_model(kind) else {}
        made: Optimizer = kind(
            model.parameters() if params is None else params, **model_option, **self.options
        )
        return made


def _takes_model(kind: Any) -> bool:
    """Whether it, or what it is made of, has an argument of that name."""
    makers = kind.__mro__[:-1] if isinstance(kind, type) else [kind]
    return any("model" in signature(make).parameters for make in makers)


# Second order is in use from the second step on.
OFTEN = {"lr": 1e-2, "update_every": 1, "refresh_every": 2}


def subject_of(path: str, options: Mapping[str, Any]) -> Subject:
    """Ours, and what is made of them, with short intervals; others with what is given.

    Args:
        path: Of the class.
        options: That were asked for.

    Raises:
        LabError: If there is no such class.
    """
    kind = Subject(path, options).find()
    ours = isinstance(kind, type) and issubclass(kind, SecondOrder)
    return Subject(path, {**(OFTEN if ours else {}), **options})
