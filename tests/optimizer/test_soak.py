"""The same seed gives the same bits, and memory stays flat; at length in ``soak.py``."""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import sys
from pathlib import Path

import pytest
import torch
from support.numerics import slow

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "memory"))
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


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_saving_and_loading_leaves_nothing_behind() -> None:
    """What is held once malloc has given back what is free; a leak would be 30 checkpoints."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("malloc cannot be asked to give back memory")
    model = soak.network(128)
    optimizer = soak.caspr(model)
    held = []
    for number in range(35):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        size = file.tell()
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        del file
        if number in (4, 34):
            gc.collect()
            libc.malloc_trim(0)
            held.append(soak.memory(torch.device("cpu"))["host"])
    assert held[1] - held[0] < 5 * size
