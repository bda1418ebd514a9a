"""Low-rank factors of peft are preconditioned, and training resumes exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import EVERY, RandomTokens, gpt2, run_example, trainer

from kronbit.state.binding import blocks_of


@pytest.mark.parametrize(
    ("name", "options", "blocks"),
    [
        ("Shampoo", {}, [1, 2, 2, 1]),  # 4 x 64, 192 x 4, 4 x 256 and 64 x 4, cut at 128
        ("Shampoo", {"max_order": 16}, [4, 12, 16, 4]),
        ("KFAC", {}, [1, 1, 1, 1]),
    ],
)
def test_low_rank_factors_are_preconditioned(
    name: str, options: dict[str, Any], blocks: list[int], device: torch.device
) -> None:
    peft = pytest.importorskip("peft")
    from kronbit.integrations import transformers as factories

    config = peft.LoraConfig(r=4, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(width=64), config).to(device)
    factory = getattr(factories, f"{name}Factory")()
    optimizer = factory(model, lr=1e-2, **options, **EVERY)
    (group,) = optimizer.param_groups  # without frozen parameters
    names = [name.split(".")[-3] for name in group["param_names"]]
    assert names == ["lora_A", "lora_B"] * 2
    assert "lora_A.default.weight" in optimizer.summary()
    x = RandomTokens()[0]["input_ids"][None].to(device)
    losses = []
    for _ in range(8):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert [len(blocks_of(entry)) for entry in optimizer.state.values()] == blocks
    counts = optimizer.diagnostics()
    assert counts["discarded_roots"] == counts["skipped_gradients"] == counts["ungrafted"] == 0


def test_low_rank_factors_resume_bit_identically_in_the_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from kronbit.integrations.transformers import ShampooFactory

    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    results = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        class_and_options = ShampooFactory, {"lr": 1e-2, **EVERY}
        trained = trainer(tmp_path, class_and_options, model=peft.get_peft_model(gpt2(), config))
        trained.train(resume_from_checkpoint=resume)
        results.append([p for p in trained.model.parameters() if p.requires_grad])
    assert len(results[0]) == 2
    assert all(map(torch.equal, *results))


def test_the_lora_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    run_example(monkeypatch, "lora.py", "--steps", "40", "--out", str(tmp_path))
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
    assert losses[7] < 0.5 * losses[4]  # the adapters alone learn a second task
    assert "lora_B.default.weight" in output
    assert "wte.weight" not in output
