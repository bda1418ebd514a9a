"""Examples and commands of the README and the docs run, and the names in them exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import markdown
from torch import nn

import kronbit
from kronbit import cli
from kronbit.config import OPTIONS
from kronbit.lab.doctor import battery
from kronbit.lab.recipe import find_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    markdown.run(page)


@pytest.mark.gpu
def test_examples_for_timm_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests skip these examples: timm cannot be imported with a CPU build of torch."""
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    assert markdown.run(ROOT / "docs" / "trainers.md", "timm") == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_relative_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def documented_commands() -> list[str]:
    lines = []
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            lines += [line for line in block.splitlines() if " kronbit " in f" {line}"]
    # The default comparison has separate tests.
    return sorted({line for line in lines if not line.startswith("pip ")} - {"kronbit compare"})


@pytest.mark.parametrize("line", documented_commands())
def test_commands_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run as written, with fewer steps, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    if words[0] == "torchrun":
        words = ["kronbit", *words[words.index("kronbit") + 1 :]]
        assert words[-2] == "--parallel"  # ranks are tested elsewhere
        words = words[:-2]
    name = words[1]
    if "--seeds" in words:
        words[words.index("--seeds") + 1] = "1"
    if "--matrices" in words:
        words[words.index("--matrices") + 1] = "1"
    if ">" in words:
        words = words[: words.index(">")]
    if "mine.yaml" in words:
        (tmp_path / "mine.yaml").write_text(find_recipe("pydoc-gpt").to_yaml(), "utf-8")
    run_folder = next((word for word in words if word.startswith("runs/")), None)
    short = ["--set", "steps=2", "--set", "batch=4", "--set", "eval_batches=1"]
    if run_folder is not None:  # the command reads an earlier run
        args = ["train", "digits-vit", *short, "--set", "model.depth=1", "--set", "first_refresh=1"]
        assert cli.run([*args, "--out", run_folder]) == 0
    elif name in ("train", "compare"):
        words += short
    elif name == "errors":
        words += ["--order", "70"]
    elif name == "doctor":  # every check has a test
        monkeypatch.setattr(battery, "CHECKS", dict(list(battery.CHECKS.items())[:2]))
    assert words[0] == "kronbit"
    assert cli.run(words[1:]) == 0


def docstring_examples() -> list[Any]:
    """Return the indented lines below every ``Example::``, with the name of their module."""
    examples = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            _, marker, rest = (ast.get_docstring(node) or "").partition("Example::\n")
            if marker:
                indented = re.match(r"(?:    .*\n|\n)+", rest + "\n")
                code = textwrap.dedent(indented[0] if indented else "")
                examples.append(pytest.param(module, code, id=f"{module}.{node.name}"))
    return examples


@pytest.mark.parametrize(("module", "code"), docstring_examples())
def test_examples_of_docstrings_run(module: str, code: str) -> None:
    """Examples can use a model and the names of their module."""
    parts = {"embedding": nn.Embedding(9, 8), "hidden": nn.Linear(8, 8), "lm_head": nn.Linear(8, 9)}
    names = {"model": nn.Sequential(OrderedDict(parts)), "kronbit": kronbit, "torch": torch}
    namespace = vars(kronbit) | vars(importlib.import_module(module)) | names
    exec(code, namespace)
    namespace["opt"].step()


def test_docstrings_have_examples() -> None:
    assert len(docstring_examples()) > 5


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert {name for name in OPTIONS if f"`{name}`" not in text} == set()


def test_public_names_have_docstrings() -> None:
    for name in kronbit.__all__:
        public = getattr(kronbit, name)
        assert inspect.getdoc(public), name
        for member, value in inspect.getmembers(public, inspect.isfunction):
            if not member.startswith("_") and value.__module__.startswith("kronbit"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_the_algorithm_map_names_functions_that_exist() -> None:
    text = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    names = re.findall(r"`(kronbit(?:\.\w+)+)`", text)
    assert len(names) > 10
    for name in names:
        module, *rest = name.split(".")
        target = __import__(module)
        for part in rest:
            if not hasattr(target, part):
                __import__(f"{target.__name__}.{part}")
            target = getattr(target, part)
