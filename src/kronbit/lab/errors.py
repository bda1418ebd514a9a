"""What the lab says when it cannot go on."""

from __future__ import annotations


class LabError(Exception):
    """Something that the user can mend; the message is one line that names it and the remedy."""


def one_line(error: BaseException) -> str:
    """The message of another package's error, or its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
