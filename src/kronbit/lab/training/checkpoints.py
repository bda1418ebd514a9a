"""Checkpoints that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kronbit.lab.errors import LabError, one_line
from kronbit.lab.training.files import replaced

FORMAT = 1


def checkpoints(folder: Path) -> list[Path]:
    """Those of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*.pt"))


def save(folder: Path, step: int, content: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint and remove old ones.

    Args:
        folder: Of the run.
        step: How many have been taken.
        content: Plain tensors, numbers, texts and dicts of them.
        keep: How many stay.

    Returns:
        Its path.

    Raises:
        LabError: If it cannot be written, say because the disk is full; older ones stay.
    """
    place = folder / "checkpoints"
    target = place / f"step-{step:08d}.pt"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with replaced(target) as file:
            torch.save({"format": FORMAT, "step": step, **content}, file)
    except (OSError, RuntimeError) as error:  # torch raises either
        older = checkpoints(folder)
        rest = f"the last one, {older[-1]}, is kept" if older else "there was none before it"
        # torch's stream reports a failed write as an error of its own; the cause is the disk's.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        raise LabError(f"cannot write the checkpoint {target}: {reason}; {rest}") from error
    for old in (*checkpoints(folder)[:-keep], *place.glob("*.new")):  # also of killed runs
        with suppress(OSError):
            old.unlink()
    return target


def load_last(folder: Path) -> dict[str, Any]:
    """The newest checkpoint of a run, on the CPU.

    Raises:
        LabError: If there is none, or it cannot be read.
    """
    paths = checkpoints(folder)
    if not paths:
        raise LabError(f"{folder} has no checkpoint to go on from: start anew without --resume")
    return read(paths[-1])


def read(path: Path) -> dict[str, Any]:
    """One checkpoint, on the CPU; only plain tensors, numbers and texts are read.

    Raises:
        LabError: If it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch writes checksums, but does not look at them
        if damaged is not None:
            raise ValueError(f"{damaged} in it is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file raises anything
        raise LabError(
            f"cannot read the checkpoint {path}: {one_line(error)[:200]}; remove it to go on from "
            "the one before"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LabError(f"{path} is not a checkpoint of this version of the lab")
    return content
