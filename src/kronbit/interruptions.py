"""Code that runs to its end although Ctrl-C arrives in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending(action: Callable[[], None]) -> Iterator[None]:
    """Do something at the end, even if Ctrl-C comes while it is being done.

    If Ctrl-C meets Python on the way from here to there, it is done late: where that would do harm,
    use ``ended_by``.

    Args:
        action: Doing it twice is as good as once.
    """
    try:
        try:
            yield
        finally:
            action()
    except BaseException:
        action()
        raise


def ended_by(action: Callable[[], None], body: Callable[[], object]) -> None:
    """Do something, and something else at its end, at once, wherever Ctrl-C comes.

    Args:
        action: Done at the end; doing it twice is as good as once.
        body: What is done before.
    """
    try:
        try:
            body()
        finally:
            action()
    except BaseException:
        action()
        raise


def to_the_end(action: Callable[[], None]) -> None:
    """Do what must not stay half done.

    Args:
        action: Doing it twice is as good as once.
    """
    try:
        action()
    except BaseException:
        action()
        raise
