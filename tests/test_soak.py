"""The same seed gives the same bits, and memory stays flat; at length: ``benchmarks/soak.py``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from conftest import slow

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import soak

LAP, LAPS = 44, 4  # each with a refresh, a save and a load
CASES = [
    pytest.param(setup, marks=() if setup == "Shampoo" else slow, id=setup) for setup in soak.SETUPS
]


@pytest.mark.usefixtures("repeatable")
@pytest.mark.filterwarnings("ignore:.*non-finite gradient")
@pytest.mark.parametrize("setup", CASES)
def test_a_second_run_is_the_first(setup: str, device: torch.device) -> None:
    width = 32 if device.type == "cpu" else 256
    first, second = (
        list(itertools.islice(soak.walk(setup, device, width, LAP), LAPS)) for _ in range(2)
    )
    assert [lap["digest"] for lap in first] == [lap["digest"] for lap in second]
    assert len({lap["digest"] for lap in first}) == LAPS  # and they are not those of the start
    if device.type == "cuda":
        for laps in (first, second):
            assert soak.drift([lap["memory"]["tensors"] for lap in laps], after=1) < 0.01


def test_drift_counts_from_the_sixth_lap_on() -> None:
    assert soak.drift([50, 60, 70, 80, 90, 100, 103, 99]) == 0.03
    assert soak.drift([50, 100, 96], after=1) == 0.04


def test_other_bits_have_another_digest() -> None:
    """In a weight, and in a code of the state."""
    model = torch.nn.Linear(70, 66)
    optimizer = soak.shampoo(model)
    model(torch.ones(1, 70)).sum().backward()
    optimizer.step()
    known = {soak.digest(model, optimizer)}
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    known.add(soak.digest(model, optimizer))
    optimizer.state[model.weight]["block_0"]["right"]["codes"].view(-1)[-1] ^= 1
    known.add(soak.digest(model, optimizer))
    assert len(known) == 3
