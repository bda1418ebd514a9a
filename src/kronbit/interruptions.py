"""Code that runs to its end even if Ctrl-C arrives in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending(cleanup: Callable[[], None]) -> Iterator[None]:
    """Run cleanup at the end, even if Ctrl-C arrives while it runs.

    If Ctrl-C arrives while Python enters or leaves the context manager, cleanup may run late. Use
    ``run_then`` where that would do harm.

    Args:
        cleanup: Must be idempotent.
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
    """Run body, then cleanup, even if Ctrl-C arrives in between.

    Args:
        body: Runs first.
        cleanup: Must be idempotent.
    """
    try:
        try:
            body()
        finally:
            cleanup()
    except BaseException:
        cleanup()
        raise


def to_the_end(action: Callable[[], None]) -> None:
    """Run an action that must not stay half done.

    Args:
        action: Must be idempotent.
    """
    try:
        action()
    except BaseException:
        action()
        raise
