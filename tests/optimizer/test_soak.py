"""Two runs with one seed are bitwise equal, and memory stays constant.

``benchmarks/memory/soak.py`` checks the same over longer runs.
"""

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

LAP, LAPS = 44, 4  # each lap has a refresh, a save and a load
CASES = [
    pytest.param(setup, marks=() if setup == "Shampoo" else slow, id=setup) for setup in soak.SETUPS
]


@pytest.mark.usefixtures("repeatable")
@pytest.mark.filterwarnings("ignore:.*non-finite gradient")
@pytest.mark.parametrize("setup", CASES)
def test_two_runs_are_bitwise_equal(setup: str, device: torch.device) -> None:
    width = 32 if device.type == "cpu" else 256
    first, second = (
        list(itertools.islice(soak.run_laps(setup, device, width, LAP), LAPS)) for _ in range(2)
    )
    assert [lap["digest"] for lap in first] == [lap["digest"] for lap in second]
    assert len({lap["digest"] for lap in first}) == LAPS  # every lap changes the digest
    if device.type == "cuda":
        for laps in (first, second):
            assert soak.drift([lap["memory"]["tensors"] for lap in laps], after=1) < 0.01


def test_drift_is_measured_from_the_sixth_lap() -> None:
    assert soak.drift([50, 60, 70, 80, 90, 100, 103, 99]) == 0.03
    assert soak.drift([50, 100, 96], after=1) == 0.04


def test_the_digest_depends_on_every_bit() -> None:
    """A flipped bit of a weight or of a code changes the digest."""
    model = torch.nn.Linear(70, 66)
    optimizer = soak.shampoo(model)
    model(torch.ones(1, 70)).sum().backward()
    optimizer.step()
    digests = {soak.digest(model, optimizer)}
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    digests.add(soak.digest(model, optimizer))
    optimizer.state[model.weight]["block_0"]["right"]["codes"].view(-1)[-1] ^= 1
    digests.add(soak.digest(model, optimizer))
    assert len(digests) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from Linux")
def test_saving_and_loading_leaks_no_memory() -> None:
    """Memory is compared after malloc returns free pages. 30 leaked checkpoints would show."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs malloc_trim")
    model = soak.network(128)
    optimizer = soak.caspr(model)
    used = []
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
            used.append(soak.memory(torch.device("cpu"))["host"])
    assert used[1] - used[0] < 5 * size
