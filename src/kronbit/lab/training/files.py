"""Files of a run: written atomically, with errors in one line."""

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
    """Create a folder, and verify that files can be written to it.

    Raises:
        LabError: If the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have removed it
    except OSError as error:
        reason = f"cannot write to {folder}: {error.strerror}; choose another with --out"
        raise LabError(reason) from error


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when all of it is on the disk."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _errors_in_one_line(path: Path) -> Iterator[None]:
    """Turn an error of writing into a ``LabError``."""
    try:
        yield
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        LabError: If the file cannot be written; an existing file is kept.
    """
    with _errors_in_one_line(path), replaced(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; NaN and infinities become null."""
    text = json.dumps(_without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by ``None``, since JSON has neither."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """``metrics.jsonl``: one line per figure, in order of steps.

    Args:
        path: Path of the file.
        size: Bytes to keep. The lines after them were written after the checkpoint that the run
            resumes from, and will be written again.
        wanted: False to write nothing, as on all ranks but the first.
    """

    def __init__(self, path: Path, size: int, wanted: bool) -> None:
        self._path, self._wanted = path, wanted
        if wanted:
            with _errors_in_one_line(path), path.open("ab") as file:
                file.truncate(size)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._wanted:
            with _errors_in_one_line(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_without_nan(line), allow_nan=False) + "\n")

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self._path.stat().st_size if self._wanted else 0
