"""What the lab says when it cannot go on."""

from __future__ import annotations


class LabError(Exception):
    """Something that the user can mend; the message is one line that names it and the remedy."""
