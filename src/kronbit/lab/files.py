"""Files of a run: written atomically, with errors in one line."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kronbit.lab.errors import lab_error


def make_folder(folder: Path) -> None:
    """Create a folder, and verify that files can be written to it.

    Raises:
        LabError: If the folder cannot be created or written to.
    """
    with lab_error(f"cannot write to {folder} (choose another with --out)", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


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


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        LabError: If the file cannot be written; an existing file is kept.
    """
    with lab_error(f"cannot write {path}", OSError), replaced(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; NaN and infinities become null."""
    write_bytes(path, f"{_to_json(content, indent=1)}\n".encode())


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a JSONL file; NaN and infinities become null."""
    with lab_error(f"cannot write {path}", OSError), path.open("a", encoding="utf-8") as file:
        file.write(f"{_to_json(line)}\n")


def shorten(path: Path, size: int) -> None:
    """Keep the first ``size`` bytes of a file; create it if it does not exist."""
    with lab_error(f"cannot write {path}", OSError), path.open("ab") as file:
        file.truncate(size)


def _to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return strict JSON, which has neither NaN nor infinities."""
    strict = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(strict, indent=indent, ensure_ascii=False, allow_nan=False)
