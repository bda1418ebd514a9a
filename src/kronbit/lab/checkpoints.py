"""Checkpoints of a run, written atomically: to a temporary file that is then renamed."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kronbit.lab.errors import LabError, lab_error
from kronbit.lab.files import replaced

FORMAT = 1


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of a run's checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*.pt"))


def save(folder: Path, step: int, content: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint and return its path. Only the last ``keep`` checkpoints are kept.

    Raises:
        LabError: If the checkpoint cannot be written. Older ones are kept.
    """
    place = folder / "checkpoints"
    target = place / f"step-{step:08d}.pt"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with replaced(target) as file:
            torch.save({"format": FORMAT, "step": step, **content}, file)
    except (OSError, RuntimeError) as error:  # torch raises both
        older = checkpoints(folder)
        rest = f"the last one, {older[-1]}, is kept" if older else "there is no earlier one"
        # torch wraps a failed write in an error of its own; the context has the cause.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        raise LabError(f"cannot write the checkpoint {target}: {reason}; {rest}") from error
    for old in (*checkpoints(folder)[:-keep], *place.glob("*.new")):  # killed runs leave *.new
        with suppress(OSError):
            old.unlink()
    return target


def load_last(folder: Path) -> dict[str, Any]:
    """Load the newest checkpoint of a run to the CPU.

    Raises:
        LabError: If the run has no checkpoint, or it cannot be read.
    """
    paths = checkpoints(folder)
    if not paths:
        raise LabError(f"{folder} has no checkpoint to resume from: start again without --resume")
    return read(paths[-1])


def read(path: Path) -> dict[str, Any]:
    """Load one checkpoint to the CPU with ``weights_only=True``, which runs no code.

    Raises:
        LabError: If the file cannot be read.
    """
    problem = f"cannot read the checkpoint {path} (remove it to resume from the one before)"
    with lab_error(problem, Exception, most=200):  # a broken file can raise anything
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:  # torch does not verify its checksums
                raise ValueError(f"its entry {damaged} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LabError(f"{path} is not a checkpoint of this version of the lab")
    return content
