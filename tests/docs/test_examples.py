"""Examples can be imported without running."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_import_without_running(example: Path) -> None:
    if example.name == "timm_registry.py":
        pytest.importorskip("timm", exc_type=ImportError)
    runpy.run_path(str(example), run_name="not_main")
