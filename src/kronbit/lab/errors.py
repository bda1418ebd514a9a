"""Errors that the lab reports to its user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """An error whose cause the user can correct. The message is one line: cause and remedy."""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its class if it is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first unknown name. The message suggests similar names, or lists all."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise LabError(f"{name!r} is not {what}; {hint}")
