"""Code that runs to its end even if Ctrl-C arrives in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending(cleanup: Callable[[], None]) -> Iterator[None]:
    """Run cleanup, which must be idempotent, at the end, even if Ctrl-C arrives while it runs.

    If Ctrl-C arrives while Python enters or leaves the context manager, cleanup may run late. Use
    ``run_then`` where that would do harm.
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
    """Run body, then cleanup, which must be idempotent, even if Ctrl-C arrives in between."""
    try:
        try:
            body()
        finally:
            cleanup()
    except BaseException:
        cleanup()
        raise


def to_the_end(action: Callable[[], None]) -> None:
    """Run an action that must not stay half done, and must be idempotent."""
    run_then(lambda: None, action)
