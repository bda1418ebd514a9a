"""Checkpoints that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kronbit.lab.errors import LabError

FORMAT = 1


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


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
    target = _path(place, step)
    aside = target.with_suffix(".new")
    try:
        place.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except (OSError, RuntimeError) as error:  # torch raises either
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        older = checkpoints(folder)
        rest = f"the last one, {older[-1]}, is kept" if older else "there was none before it"
        # torch's stream reports a failed write as an error of its own; the cause is the disk's.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
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
    found = checkpoints(folder)
    if not found:
        raise LabError(f"{folder} has no checkpoint to go on from: start anew without --resume")
    return read(found[-1])


def _refuse_damaged(path: Path) -> None:
    """A byte may have changed since: torch writes checksums, but does not look at them."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")


def read(path: Path) -> dict[str, Any]:
    """One checkpoint, on the CPU; only plain tensors, numbers and texts are read.

    Raises:
        LabError: If it cannot be read.
    """
    try:
        _refuse_damaged(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file raises anything
        raise LabError(
            f"cannot read the checkpoint {path}: {' '.join(str(error).split())[:200]}; remove it "
            "to go on from the one before"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LabError(f"{path} is not a checkpoint of this version of the lab")
    return content
