"""Accelerate prepares, scales, shards, saves and resumes the optimizer."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_on_ranks, run_script_on_ranks
from support.trainers import EVERY, EXAMPLES, run_example
from torch import nn

from kronbit import Shampoo


def test_accelerate_prepares_without_changing_the_optimizer(
    tmp_path: Path, device: torch.device
) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(20, 30)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **EVERY)
    before = copy.deepcopy(optimizer.state_dict())
    on_cpu = device.type == "cpu"
    accelerator = accelerate.Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
    model, prepared = accelerator.prepare(model, optimizer)
    assert optimizer.state_dict() == before
    twin = nn.Linear(20, 30).to(device)
    twin.load_state_dict(model.state_dict())
    plain = Shampoo(twin.parameters(), lr=1e-2, **EVERY)
    for t in range(8):
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(t)).to(device)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            prepared.step()
            prepared.zero_grad()
        (twin(x).square().mean() / 2).backward()
        if t % 2:
            plain.step()
            plain.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert {entry["step"] for entry in optimizer.state.values()} == {4}
    # Training after load_state repeats training after save_state.
    accelerator.save_state(str(tmp_path))
    results = []
    for t in range(2):
        if t == 1:
            accelerator.load_state(str(tmp_path))
        for _ in range(4):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for p, q, r in zip(*results, twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, r)


@pytest.mark.gpu
def test_accelerate_scales_in_fp16() -> None:
    accelerate = pytest.importorskip("accelerate")
    scaling = accelerate.utils.GradScalerKwargs(init_scale=2.0**30, growth_interval=1000)
    accelerator = accelerate.Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
    model = nn.Linear(20, 30)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **EVERY)
    model, prepared = accelerator.prepare(model, optimizer)
    steps = 0
    for t in range(24):
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(t)).cuda()
        accelerator.backward(model(x).square().mean())
        prepared.step()
        prepared.zero_grad()
        steps += not accelerator.optimizer_step_was_skipped
    assert 0 < steps < 24
    assert {entry["step"] for entry in optimizer.state.values()} == {steps}
    assert optimizer.diagnostics()["skipped_gradients"] == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def train_with_accelerate_fsdp2(rank: int, folder: str) -> list[list[Any]]:
    """Return weights trained with FSDP2, saved and loaded midway, and those of one process."""
    import accelerate

    plugin = accelerate.utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    network = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 5)).cuda()
    reference = Shampoo(network.parameters(), lr=1e-2, process_group=False, **EVERY)
    model = copy.deepcopy(network)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **EVERY)
    model, prepared = accelerator.prepare(model, optimizer)
    for t in range(8):
        x = torch.randn(16, 70, generator=torch.Generator().manual_seed(t)).cuda()
        accelerator.backward(model(x).square().mean())
        prepared.step()
        prepared.zero_grad()
        network(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
        if t == 3:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            accelerator.load_state(folder)
    assert optimizer._ranks.owners is not None
    weights = [p.full_tensor().tolist() for p in model.parameters()]
    accelerator.end_training()
    return [weights, [p.tolist() for p in network.parameters()]]


@pytest.mark.gpu
def test_accelerate_shards_and_resumes(tmp_path: Path) -> None:
    """For FSDP2, Accelerate replaces the optimizer's parameters. The test uses one NCCL rank."""
    pytest.importorskip("accelerate")
    function_and_folder = train_with_accelerate_fsdp2, str(tmp_path)
    for weights, expected in run_on_ranks(1, *function_and_folder, backend="torchrun"):
        for p, q in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-6)


def test_the_accelerate_example_learns_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    out = "--out", str(tmp_path)
    run_example(monkeypatch, "accelerate_loop.py", *out, "--epochs", "3")
    output = capsys.readouterr().out
    # `accelerate launch` starts the script in the same way.
    script = str(EXAMPLES / "accelerate_loop.py")
    output += run_script_on_ranks(2, script, *out, "--epochs", "1", "--resume")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
