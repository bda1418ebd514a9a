"""Options given as text, on a command line or in a trainer's ``optim_args``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

_WORDS = {"true": True, "false": False, "none": None, "null": None}


def read_options(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Parse options such as ``"bits=4, method=cholesky, betas=(0.9, 0.95)"``.

    Args:
        given: ``name=value`` pairs, separated by commas, or a mapping whose values may be text.

    Returns:
        The options. Text that reads as a number, ``True``, ``False``, ``None`` or a tuple is
        converted; other text and other values are kept.

    Raises:
        ValueError: If a part has no name or no value, or a name occurs twice.
    """
    if isinstance(given, Mapping):
        return {name: _value(value) for name, value in given.items()}
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, _parts(given))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name.isidentifier() and equals and value):
            raise ValueError(f"options must be like bits=4,update_every=10; got {part!r}")
        if name in options:
            raise ValueError(f"option {name!r} is given twice: {given!r}")
        options[name] = _value(value)
    return options


def _parts(text: str) -> list[str]:
    """Split at commas, except inside brackets and quoted values."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and parts[-1].rstrip()[-1:] in ("=", "(", "[", "{", ","):
            quote = character
        elif character == "," and depth == 0:
            parts.append("")
            continue
        depth += 0 if quote else (character in "([{") - (character in ")]}")
        parts[-1] += character
    if depth or quote:
        raise ValueError(f"brackets and quotes must be closed; got {text!r}")
    return parts


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        read = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(read) if isinstance(read, list) else read
