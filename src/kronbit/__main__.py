"""The command ``kronbit``, also as ``python -m kronbit``."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = {"typer": "typer", "rich": "rich", "yaml": "pyyaml"}


def main() -> None:
    """Run the command. If packages of the lab are missing, name them."""
    missing = [name for module, name in _NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        named = ", ".join(missing)
        sys.exit(f"kronbit: error: the command needs {named}: pip install 'kronbit[lab]'")
    from kronbit.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
