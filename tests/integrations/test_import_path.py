"""Options are given as text, and optimizers by their import path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.trainers import run_example

from kronbit.integrations.strings import read_options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bits=4,update_every=10", {"bits": 4, "update_every": 10}),
        ("betas=(0.9, 0.95), lr=1e-3", {"betas": (0.9, 0.95), "lr": 1e-3}),
        ("split_sizes=[64,64],bits=8", {"split_sizes": (64, 64), "bits": 8}),
        ("stagger=True, cuda_graph=false", {"stagger": True, "cuda_graph": False}),
        ("first_refresh=None,method=cholesky", {"first_refresh": None, "method": "cholesky"}),
        ("base='sgd'", {"base": "sgd"}),
        ("skip='head,norm', bits=8", {"skip": "head,norm", "bits": 8}),
        ("pairs=(1,(2,(3,4))),bits=8", {"pairs": (1, (2, (3, 4))), "bits": 8}),
        ("rows=[[1,2],[3,4]],bits=8", {"rows": ([1, 2], [3, 4]), "bits": 8}),
        ("words=('a)b', 2), bits=8", {"words": ("a)b", 2), "bits": 8}),
        ("one=don't,two=can't,bits=8", {"one": "don't", "two": "can't", "bits": 8}),
        ("", {}),
        ({"bits": "4", "lr": 0.1, "method": "eigen"}, {"bits": 4, "lr": 0.1, "method": "eigen"}),
    ],
)
def test_text_becomes_values(text: Any, expected: dict[str, Any]) -> None:
    assert read_options(text) == expected


@pytest.mark.parametrize(
    "text", ["bits", "bits=", "=4", "bits=4,bits=8", "4=bits", "bits 4", "betas=(0.9,1"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"got|twice"):
        read_options(text)


@pytest.mark.parametrize("name", ["Shampoo", "CASPR"])
def test_the_import_path_example_learns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--optimizer_type", f"kronbit.{name}", "--optimizer_args", "bits=8", "first_refresh=5"]
    run_example(monkeypatch, "import_path.py", *args, "betas=(0.9, 0.95)", "method='cholesky'")
    lines = re.findall(r"(\w+): loss ([\d.]+) to ([\d.]+)", capsys.readouterr().out)
    assert [kind for kind, _, _ in lines] == [name, "Shampoo"]
    assert all(float(last) < float(first) for _, first, last in lines)
