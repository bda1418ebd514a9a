"""Errors that the lab reports to its user."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class LabError(Exception):
    """An error whose cause the user can correct. The message is one line: cause and remedy."""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its class if it is empty."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def lab_error(problem: str, *kinds: type[Exception], most: int | None = None) -> Iterator[None]:
    """Turn errors of these kinds into a ``LabError``: the problem, if any, and the reason.

    ``most`` is the maximum length of the reason.
    """
    try:
        yield
    except kinds as error:
        reason = (getattr(error, "strerror", None) or one_line(error))[:most]
        raise LabError(f"{problem}: {reason}" if problem else reason) from error


def import_optional(module: str, package: str, user: str) -> Any:
    """Import a module of a package that may be missing. Errors name ``user``, which needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LabError(f"{user} needs a package: pip install {package}") from error


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first unknown name. The message suggests similar names, or lists all."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise LabError(f"{name!r} is not {what}; {hint}")
