"""The examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_demo_compares_optimizers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo`, shortened to a few steps of one seed."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import compare

    monkeypatch.setattr(compare, "STEPS", 25)
    monkeypatch.setattr(compare, "SEEDS", (0,))
    compare.main()
    table = capsys.readouterr().out
    for name in compare.OPTIMIZERS:
        assert name in table
    assert "302" in table  # KiB of second-order state in 4 bits as in the paper, 2081 in 32
    assert "166" in table  # and by default
    assert "2,081" in table


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_import_without_running(example: Path) -> None:
    runpy.run_path(str(example), run_name="not_main")
