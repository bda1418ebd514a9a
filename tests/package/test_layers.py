"""Imports point down: a room imports only the rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import kronbit

ROOT = Path(kronbit.__file__).parent
# From the lowest layer to the highest. A room may import itself and the layers below it, but not
# another room of its layer. Top-level modules are rooms of one file.
LAYERS = (
    ("interruptions", "quantization"),
    ("config",),
    ("kernels", "messages"),
    ("linalg",),
    ("rules", "factors"),
    ("blocks",),
    ("gpu",),
    ("distributed",),
    ("statistics",),
    ("step", "base"),
    ("state",),
    ("routing", "reporting"),
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


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement imports, or a call of ``import_module`` with a constant."""
    if isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def imports(source: str) -> set[str]:
    """Return the kronbit modules that a module imports, also in functions and for type checking."""
    modules = set()
    for name in (name for node in ast.walk(ast.parse(source)) for name in names(node)):
        if name.split(".")[0] == "kronbit":
            while name not in ALL and f"{name}.__init__" not in ALL:
                name = name.rpartition(".")[0]
            modules.add(name if name in ALL else f"{name}.__init__")
    return modules


IMPORTS = {module: imports(path.read_text()) - {module} for module, path in ALL.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def cycle(edges: Mapping[str, set[str]]) -> str:
    """Return the nodes that lie on cycles or between them."""
    remaining = set(edges)
    while remaining:
        imported = set().union(*(edges[node] for node in remaining))
        kept = {node for node in remaining & imported if edges[node] & remaining}
        if kept == remaining:
            break
        remaining = kept
    return ", ".join(sorted(remaining))


def test_no_import_is_relative() -> None:
    relative = [
        f"{module}: {name}"
        for module, path in ALL.items()
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names(node)
        if name.startswith(".")
    ]
    assert not relative, "\n".join(relative)


def test_imports_in_functions_and_for_types_are_seen() -> None:
    for source in (
        "def f():\n    import kronbit.cli.options",
        "if TYPE_CHECKING:\n    from kronbit.cli import options",
        "from kronbit.cli.options import name",
        "importlib.import_module('kronbit.cli.options')",
    ):
        assert imports(source) == {"kronbit.cli.options"}
    assert imports("from kronbit import Shampoo; import torch") == {"kronbit.__init__"}


def test_every_room_has_a_layer() -> None:
    assert {room(module) for module in ALL} == LEVEL.keys()


def test_imports_point_down() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in IMPORTS.items()
        for target in targets
        if room(target) != room(module) and LEVEL[room(target)] >= LEVEL[room(module)]
    ]
    assert not upward, "\n".join(upward)


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    assert not cycle(IMPORTS)
    assert cycle({"a": {"b"}, "b": {"a", "d"}, "c": {"a"}, "d": set()}) == "a, b"


def test_rooms_of_the_lab_do_not_import_each_other_in_a_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for module, targets in IMPORTS.items():
        if room(module) == "lab":
            part = module.split(".")[2]
            inside = {target.split(".")[2] for target in targets if room(target) == "lab"}
            edges[part] = edges.get(part, set()) | inside - {part}
    assert not cycle(edges)
