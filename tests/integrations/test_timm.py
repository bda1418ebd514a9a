"""timm creates the optimizers by name."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from support.trainers import EVERY, run_example
from torch import nn

from kronbit import Shampoo


def test_timm_creates_optimizers_by_name(device: torch.device) -> None:
    optim = pytest.importorskip("timm.optim", exc_type=ImportError)
    importlib.import_module("kronbit.integrations.timm")  # registers the names

    assert {"shampoo4bit", "caspr4bit"} <= set(optim.list_optimizers())
    model = nn.Sequential(nn.Linear(20, 70), nn.LayerNorm(70), nn.Linear(70, 8)).to(device)
    make = {"lr": 1e-3, "weight_decay": 0.05, "betas": (0.9, 0.99), "eps": 1e-7, "bits": 8}
    optimizer = optim.create_optimizer_v2(
        model, opt="shampoo4bit", fallback_list=["2.weight"], **make, **EVERY
    )
    assert isinstance(optimizer, Shampoo)
    by_parameter = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert by_parameter[model[0].weight]["precondition"]
    assert not by_parameter[model[2].weight]["precondition"]
    assert by_parameter[model[0].weight]["weight_decay"] == 0.05
    assert by_parameter[model[0].bias]["weight_decay"] == 0.0
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.99)}
    for _ in range(3):
        model(torch.randn(4, 20).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.memory()["roots"] > 0


@pytest.mark.parametrize("name", ["shampoo4bit", "caspr4bit"])
def test_the_timm_example_learns(
    name: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_example(monkeypatch, "timm_registry.py", "--opt", name)
    output = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", output))
    assert last < 0.7 * first
    assert "precondition=False" in output  # the head
