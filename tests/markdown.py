"""Runs the Python examples of Markdown files: ``python tests/markdown.py README.md``.

The blocks of one file share a namespace and run in order, as a reader would type them. Needs
nothing but what the examples need.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(path: Path) -> int:
    """Execute all blocks; returns how many there were."""
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = list(_BLOCK.finditer(text))
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block.group(1), str(path), "exec")
        exec(code, namespace)
    return len(blocks)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: {run(Path(argument))} examples run")
