"""Warnings that point at the user's line, and names of parameters for messages."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kronbit.config import Config

# Name, parameter, options.
NamedParameter: TypeAlias = tuple[str, Tensor, Config]

_INSIDE = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,  # calls functions that a context manager decorates
)


def warn(message: str) -> None:
    """Issue a warning that points at the innermost line outside of kronbit and torch."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def parameter_name(group: Mapping[str, Any], index: int, number: int) -> str:
    """Return the user's name for a parameter, or else its position in the param groups."""
    names = group.get("param_names")
    return names[number] if names else f"group {index}, parameter {number}"


def named_parameters(
    groups: Iterable[Mapping[str, Any]], config_of: Callable[[Mapping[str, Any]], Config]
) -> list[NamedParameter]:
    """Return each parameter of the param groups once, with its name and options."""
    by_parameter = {
        p: (parameter_name(group, index, number), p, config_of(group))
        for index, group in enumerate(groups)
        for number, p in enumerate(group["params"])
    }
    return list(by_parameter.values())
