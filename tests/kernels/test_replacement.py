"""Kernels and torch replace the same rows of the state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronbit.factors.stack import replacement

LENGTHS = {"codes": (9000,), "scales": (17, 4), "diagonal": (5000,), "tops": (3,)}


def leaves(rows: int, seed: int, odd: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in LENGTHS.items():
        if name in ("diagonal", "tops"):
            tensors[name] = torch.randn(rows, *shape, generator=generator)
        else:
            size = (rows, *shape[:-1], shape[-1] + odd)
            tensors[name] = torch.randint(256, size, generator=generator).to(torch.uint8)
    return tensors


@pytest.mark.parametrize("device_fixture", ["device", "kernels"])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_rows_that_are_not_finite_stay(
    count: int, odd: bool, device_fixture: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Rows that are not finite, not trusted or outside the window stay. Others are replaced."""
    request.getfixturevalue(device_fixture)
    names = ["diagonal"] if count == 1 else list(LENGTHS)
    old, new = ({name: leaves(6, seed, odd)[name] for name in names} for seed in (1, 2))
    new["diagonal"][1, 4999] = torch.nan
    new[names[-1]][2, 0] = -torch.inf
    new["diagonal"][3, 0] = torch.finfo(torch.float32).max
    trusted = torch.tensor([True, True, True, True, False, True])
    expected = torch.tensor([True, False, False, True, False, True])
    replaced = (expected & (torch.arange(6) < 5)).tolist()
    expected_leaves = {
        name: torch.stack([(new if good else old)[name][row] for row, good in enumerate(replaced)])
        for name in names
    }
    accepted = trusted.to(device)
    actual, fresh = ({name: leaf.to(device) for name, leaf in x.items()} for x in (old, new))
    part = {name: tensor[:5] for name, tensor in actual.items()}
    part["another"] = torch.zeros(5, device=device)
    given = {name: leaf[:5] for name, leaf in fresh.items()}
    replacement(part, given, accepted[:5])()
    assert torch.equal(accepted.cpu(), expected)
    for name, tensor in actual.items():
        assert torch.equal(tensor.cpu(), expected_leaves[name]), name
