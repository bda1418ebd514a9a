"""Imports point down: a room imports only the rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kronbit

ROOT = Path(kronbit.__file__).parent
# From the lowest layer to the highest. A room may import itself and the layers below it, but not
# another room of its layer. Top-level modules are rooms of one file.
LAYERS = (
    ("interruptions", "messages", "quantization"),
    ("config",),
    ("kernels",),
    ("linalg",),
    ("rules", "factors"),
    ("blocks",),
    ("gpu",),
    ("distributed",),
    ("statistics",),
    ("step", "base"),
    ("state",),
    ("reporting",),
    ("routing",),
    ("optimizer",),
    ("algorithms",),
    ("estimate",),
    ("__init__",),
    ("baselines", "integrations"),
    ("lab",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
ALL = {
    ".".join(("kronbit", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(module: str) -> Iterator[str]:
    """Yield the kronbit modules that a module imports, also in functions and for type checking."""
    for node in ast.walk(ast.parse(ALL[module].read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kronbit":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "kronbit"]
        for name in names:
            while name not in ALL and f"{name}.__init__" not in ALL:
                name = name.rpartition(".")[0]
            yield name if name in ALL else f"{name}.__init__"


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_a_layer() -> None:
    assert {room(module) for module in ALL} == LEVEL.keys()


def test_imports_point_down() -> None:
    upward = [
        f"{module} imports {target}"
        for module in ALL
        for target in imports(module)
        if room(target) != room(module) and LEVEL[room(target)] >= LEVEL[room(module)]
    ]
    assert not upward, "\n".join(upward)


def test_imports_have_no_cycle() -> None:
    """Modules of one room do not import each other in a cycle either."""
    remaining = {module: set(imports(module)) - {module} for module in ALL}
    while remaining:
        independent = {
            module for module, targets in remaining.items() if not targets & remaining.keys()
        }
        assert independent, f"these import each other: {', '.join(sorted(remaining))}"
        remaining = {
            module: targets for module, targets in remaining.items() if module not in independent
        }
