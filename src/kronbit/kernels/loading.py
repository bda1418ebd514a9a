"""Load compiled kernels safely while other threads and processes do the same.

Up to Triton 3.6, the C code that launches kernels of a signature is compiled into a shared library
in Triton's cache. Builders that start at the same time replace each other's file. Python identifies
libraries by inode, and may then reuse a loaded library of another signature, which reads arguments
with the wrong types. So one thread of one process builds a library, and the others load it.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from triton import knobs

_builders: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def load(compiled: Any) -> None:
    """Load a compiled kernel onto the current GPU.

    Args:
        compiled: Result of ``kernel.warmup``; None where a hook keeps Triton from compiling.
    """
    if compiled is None:
        return
    with _only_builder(_library(compiled.src.signature.values())):
        _ = compiled.run


def _library(types: Any) -> str:
    """Return the name of a lock: equal for all signatures that may share a library."""
    words = " ".join("*" if str(name).startswith("*") else str(name) for name in types)
    return f"kronbit-launcher-{zlib.crc32(words.encode()):08x}.lock"


@contextmanager
def _only_builder(name: str) -> Iterator[None]:
    with _builders[name]:
        file = _locked(Path(knobs.cache.dir) / name)
        try:
            yield
        finally:
            if file is not None:
                file.close()  # which unlocks it


def _locked(path: Path) -> IO[bytes] | None:
    """Return an open file with an exclusive lock; None where files cannot be locked."""
    with suppress(ImportError, OSError):
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            raise
        return file
    return None
