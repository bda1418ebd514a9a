"""Code that runs to completion even if Ctrl-C interrupts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def cleaning_up(cleanup: Callable[[], None]) -> Iterator[None]:
    """Run cleanup on exit, even if Ctrl-C interrupts it. cleanup must be idempotent.

    If Ctrl-C arrives while Python enters or leaves the context manager, cleanup may run late. Use
    ``run_then`` where a late cleanup would do harm.
    """
    try:
        try:
            yield
        finally:
            cleanup()
    except BaseException:
        cleanup()
        raise


def run_then(body: Callable[[], object], cleanup: Callable[[], None]) -> None:
    """Run body, then cleanup, even if Ctrl-C arrives in between. cleanup must be idempotent."""
    try:
        try:
            body()
        finally:
            cleanup()
    except BaseException:
        cleanup()
        raise
