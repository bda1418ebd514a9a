"""Entry point of the command ``kronbit`` and of ``python -m kronbit``."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = {"typer": "typer", "rich": "rich", "yaml": "pyyaml"}  # module -> package


def main() -> None:
    """Run the command, or exit with the names of the packages that are missing."""
    missing = [name for module, name in _NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        names = ", ".join(missing)
        sys.exit(f"kronbit: error: the command needs {names}: pip install 'kronbit[lab]'")
    from kronbit.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
