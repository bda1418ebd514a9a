"""Hydra builds the optimizer from a config."""

from __future__ import annotations

import re

import pytest
import torch
from support.trainers import run_example
from torch import nn

from kronbit import Shampoo


def test_hydra_builds_an_optimizer_from_a_config() -> None:
    hydra = pytest.importorskip("hydra.utils")
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        {
            "_target_": "kronbit.Shampoo",
            "base": "adamw",
            "lr": 1e-3,
            "betas": [0.9, 0.95],
            "bits": 4,
            "split_sizes": [10, 20],
        }
    )
    model = nn.Linear(20, 30)
    optimizer = hydra.instantiate(config, params=model.parameters())
    assert isinstance(optimizer, Shampoo)
    assert optimizer.config.split_sizes == (10, 20)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()


def test_the_hydra_example_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra.utils")
    overrides = "optimizer.bits=8", "optimizer.base=sgd", "optimizer.lr=0.1"
    run_example(monkeypatch, "hydra_config.py", *overrides)
    output = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", output))
    assert last < 0.5 * first
    assert "Shampoo around SGD" in output
