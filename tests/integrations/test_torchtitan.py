"""torchtitan's container builds the optimizer from a config and resumes exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.trainers import run_example
from torch import nn


def test_the_torchtitan_example_resumes_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchtitan")
    monkeypatch.chdir(tmp_path)
    run_example(monkeypatch, "torchtitan_container.py")
    output = capsys.readouterr().out
    first, last, resumed = (
        float(loss) for loss in re.findall(r"(?:loss|checkpoint:) ([\d.]+)", output)
    )
    assert last == resumed < 0.7 * first
    assert re.search(r"tok_embeddings.weight .* precondition=False", output)
    assert re.search(r"layers.0.weight .* cholesky", output)


def test_torchtitan_still_resolves_its_optimizers() -> None:
    pytest.importorskip("torchtitan")
    from kronbit.integrations.torchtitan import KronbitOptimizers

    assert KronbitOptimizers._resolve_optimizer_factory("AdamW") is torch.optim.AdamW
    with pytest.raises(NotImplementedError, match="Adagrad"):
        KronbitOptimizers._resolve_optimizer_factory("Adagrad")


def test_the_torchtitan_config_accepts_every_option() -> None:
    """Options of groups, the optimizer and the base are accepted. Unknown options are refused."""
    pytest.importorskip("torchtitan")
    from kronbit.integrations.torchtitan import shampoo4bit

    options = {"bits": 8, "workspace_mb": 64, "base": "sgd", "momentum": 0.9}
    config = shampoo4bit(lr=0.1, left_to_base="bias", **options)
    config.implementation = "foreach"
    (optimizer,) = config.build(model_parts=[nn.Linear(20, 30)])
    assert isinstance(optimizer.base, torch.optim.SGD)
    assert optimizer.config.workspace_mb == 64
    for group in optimizer.param_groups:
        values = group["lr"], group["momentum"], group["bits"], group["precondition"]
        assert values == (0.1, 0.9, 8, group["params"][0].ndim == 2)
    config = shampoo4bit(foreach=True, fused=False)  # takes precedence over the container
    (optimizer,) = config.build(model_parts=[nn.Linear(20, 30)])
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (
        True,
        False,
    )
    with pytest.raises(TypeError, match="refresh_evry"):
        shampoo4bit(refresh_evry=10).build(model_parts=[nn.Linear(20, 30)])


def test_implementations_that_torchtitan_has_for_adamw_alone_are_refused() -> None:
    pytest.importorskip("torchtitan")
    from kronbit.integrations.torchtitan import shampoo4bit

    config = shampoo4bit()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match=r"fused_opt_states_bf16.*use 'fused'"):
        config.build(model_parts=[nn.Linear(20, 30)])
