"""Runs the Python examples of Markdown files: ``python tests/support/markdown.py README.md``.

The blocks of one file share a namespace and run in order, as a reader would type them. Needs
nothing but what the examples need. A block with ``title="needs timm"`` stands for itself, and is
left out where that package cannot be imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

_BLOCK = re.compile(
    r'^```python(?: title="needs (?P<package>\w+)")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL
)


def run(path: Path, package: str | None = None) -> int:
    """Execute all blocks, or those that need a certain package; returns how many there were."""
    text = path.read_text(encoding="utf-8")
    blocks = list(_BLOCK.finditer(text))
    if len(blocks) != text.count("\n```python"):
        raise ValueError(f"{path}: a block of Python is not written as others are")
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for block in blocks:
        needs = block["package"]
        if (package is None and not _there(needs)) or (package is not None and needs != package):
            continue
        line = text.count("\n", 0, block.start("code"))
        code = compile("\n" * line + block["code"], str(path), "exec")
        exec(code, namespace)
        count += 1
    return count


def _there(package: str | None) -> bool:
    try:
        return package is None or bool(importlib.import_module(package))
    except Exception:  # some are installed, but not for this torch
        return False


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: {run(Path(argument))} examples run")
