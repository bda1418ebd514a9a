"""Run the Python examples of Markdown files: ``python tests/support/markdown.py README.md``.

The blocks of one file share a namespace and run in order. The script imports only what the examples
import. A block with ``title="needs timm"`` is skipped if that package cannot be imported.
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
    """Execute the blocks of a file.

    Args:
        path: The Markdown file.
        package: Execute only blocks that need this package. By default, execute all blocks whose
            packages can be imported.

    Returns:
        The number of executed blocks.
    """
    text = path.read_text(encoding="utf-8")
    blocks = list(_BLOCK.finditer(text))
    if len(blocks) != text.count("\n```python"):
        raise ValueError(f"{path}: a Python block has an unexpected format")
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for block in blocks:
        needs = block["package"]
        if (package is None and not _importable(needs)) or (
            package is not None and needs != package
        ):
            continue
        line = text.count("\n", 0, block.start("code"))
        code = compile("\n" * line + block["code"], str(path), "exec")
        exec(code, namespace)
        count += 1
    return count


def _importable(package: str | None) -> bool:
    try:
        return package is None or bool(importlib.import_module(package))
    except Exception:  # for example, built for another torch
        return False


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: {run(Path(argument))} examples run")
