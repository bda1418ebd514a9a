"""Benchmarks and examples import only names that exist. Most of these scripts do not run in CI."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path for folder in ("benchmarks", "examples") for path in ROOT.glob(f"{folder}/**/*.py")
)
OPTIONAL = {"timm", "torchtitan", "triton"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_is_imported_from_kronbit_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] == "kronbit":
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                assert error.name in OPTIONAL  # noqa: PT017
                continue
            for name in (alias.name for alias in node.names):
                submodule = f"{node.module}.{name}"
                assert hasattr(module, name) or importlib.util.find_spec(submodule), submodule
