"""Errors that the lab reports to its user."""

from __future__ import annotations


class LabError(Exception):
    """An error whose cause the user can correct. The message is one line: cause and remedy."""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its class if it is empty."""
    return " ".join(str(error).split()) or type(error).__name__
