"""Checks of names that the user has given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kronbit.lab.errors import LabError


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown names.

    Raises:
        LabError: For the first unknown name. The message suggests similar names, or lists all.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise LabError(f"{name!r} is not {what}; {hint}")
