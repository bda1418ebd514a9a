"""Warnings that point at the user's own line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_INSIDE = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,  # what is decorated by a context manager is called from there
)


def warn(message: str) -> None:
    """Warn at the innermost line that is neither ours nor torch's.

    Args:
        message: What is the matter.
    """
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def parameter_name(group: Mapping[str, Any], index: int, number: int) -> str:
    """The name that the parameter was given with, or its place in the param groups."""
    names = group.get("param_names")
    return names[number] if names else f"group {index}, parameter {number}"
