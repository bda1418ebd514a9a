"""The files of a run: what is written there, and never half."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kronbit.lab.errors import LabError


def make_folder(folder: Path) -> None:
    """A folder that can be written to.

    Raises:
        LabError: If it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have done so
    except OSError as error:
        reason = f"cannot write to {folder}: {error.strerror}; choose another with --out"
        raise LabError(reason) from error


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another once it is whole and on the disk."""
    aside = path.with_name(f"{path.name}.new")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of writing, as one line."""
    try:
        yield
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write aside, then rename.

    Raises:
        LabError: If it cannot be written; what was there before stays.
    """
    with _named(path), replaced(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write aside, then rename."""
    text = json.dumps(_strict(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def _strict(value: Any) -> Any:
    """JSON has no NaN: null stands for a loss that is no number any more."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """``metrics.jsonl``: one line per figure, in order of steps.

    Args:
        path: Where.
        size: Go on after so many bytes: what follows was written after the checkpoint that the run
            goes on from, and will be written again.
        wanted: Whether anything is written: only by the first rank.
    """

    def __init__(self, path: Path, size: int, wanted: bool) -> None:
        self._path, self._wanted = path, wanted
        if wanted:
            with _named(path), path.open("ab") as file:
                file.truncate(size)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._wanted:
            with _named(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_strict(line), allow_nan=False) + "\n")

    def size(self) -> int:
        """How many bytes there are."""
        return self._path.stat().st_size if self._wanted else 0
