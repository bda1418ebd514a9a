"""The library has no side effects (network, files, processes), and source files are short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Audit hooks see everything that leaves the process. They cannot be removed, so the script runs in
# a new process.
SCRIPT = """
import sys

events = []


def hook(event, args):
    if event == "open":
        mode, flags = args[1:]
        writes = any(letter in mode for letter in "wax+") if mode else flags & 3
        events.extend([(event, args)] if writes else [])
    elif event.partition(".")[0] in ("socket", "subprocess", "urllib", "http", "ftplib"):
        events.append((event, args))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.system", "os.posix_spawn"):
        events.append((event, args))


sys.addaudithook(hook)
import torch
from torch import nn

model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 4))


def steps(optimizer):
    for _ in range(4):
        model(torch.randn(8, 70)).square().mean().backward()
        optimizer.step()
        optimizer.state_dict()


steps(torch.optim.AdamW(model.parameters()))
expected = len(events)
sys.modules["triton"] = None  # as if it were not installed
import kronbit

for optimizer in (
    kronbit.Shampoo(model.parameters(), lr=1e-3, update_every=1, refresh_every=2),
    kronbit.KFAC(model.parameters(), model=model, lr=1e-3, update_every=1, refresh_every=2),
):
    steps(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    print(optimizer.summary())
    optimizer.diagnostics()
kronbit.estimate_memory(model)
assert not events[expected:], events[expected:]
open("written", "w").close()
assert len(events) == expected + 1  # the hook works
"""


def test_nothing_leaves_the_process(tmp_path: Path) -> None:
    """Imports and steps need no Triton and cause no audit events beyond those of AdamW."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


def test_no_file_has_more_than_500_lines() -> None:
    """A longer file usually holds more than one concept."""
    lines = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert "tests/package/test_hygiene.py" in lines
    assert not {path: count for path, count in lines.items() if count > 500}
