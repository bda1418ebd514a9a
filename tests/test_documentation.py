"""Every example of the README and the docs runs; what is named there exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import markdown
import pytest

import kronbit
from kronbit.config import OPTIONS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    markdown.run(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_option_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert {name for name in OPTIONS if f"`{name}`" not in text} == set()


def test_public_names_have_docstrings() -> None:
    for name in kronbit.__all__:
        found = getattr(kronbit, name)
        assert inspect.getdoc(found), name
        for member, value in inspect.getmembers(found, inspect.isfunction):
            if not member.startswith("_") and value.__module__.startswith("kronbit"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_the_algorithm_map_names_functions_that_exist() -> None:
    text = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    names = re.findall(r"`(kronbit(?:\.\w+)+)`", text)
    assert len(names) > 10
    for name in names:
        module, *rest = name.split(".")
        found = __import__(module)
        for part in rest:
            if not hasattr(found, part):
                __import__(f"{found.__name__}.{part}")
            found = getattr(found, part)
