"""transformers' Trainer trains and resumes with the class or a factory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numerics import relative_error
from support.trainers import EVERY, gpt2, on_gpu, run_example, trainer, unwrapped

from kronbit import Shampoo
from kronbit.state.binding import blocks_of


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize(
    ("device", "amp"),
    [
        pytest.param("cpu", {}, id="float32"),
        pytest.param("cpu", {"bf16": True}, id="bf16"),
        on_gpu("cuda", {}, id="cuda-float32"),
        on_gpu("cuda", {"bf16": True}, id="cuda-bf16"),
        on_gpu("cuda", {"fp16": True}, id="cuda-fp16"),
    ],
)
def test_the_trainer_accepts_the_class_and_resumes_bit_identically(
    tmp_path: Path, device: str, amp: dict[str, Any]
) -> None:
    class_and_options = Shampoo, {"lr": 1e-3, "weight_decay": 0.1, "bits": 4, **EVERY}
    uninterrupted = trainer(tmp_path, class_and_options, device, **amp)
    uninterrupted.train()
    optimizer = unwrapped(uninterrupted)
    assert isinstance(optimizer, Shampoo)
    assert all(entry["step"] == 6 for entry in optimizer.state.values())
    assert optimizer.memory()["roots"] > 0
    assert {p.device.type for p in optimizer.state} == {device}
    resumed = trainer(tmp_path, class_and_options, device, **amp)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for p, q in zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_trainer_matches_a_plain_loop(tmp_path: Path) -> None:
    """Apart from step(), Trainer only accumulates and clips gradients and sets learning rates."""
    options = {"lr": 1e-3, "weight_decay": 0.1, **EVERY}
    trained = trainer(tmp_path, (Shampoo, options))
    inputs: list[dict[str, Any]] = []
    trained.model.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs), with_kwargs=True
    )
    trained.train()
    batches = iter(inputs)
    model = gpt2()
    decay = trained.get_decay_parameter_names(model)
    named = list(model.named_parameters())
    # The Trainer sets the weight decay of both groups; its default is 0.
    groups = [
        {"params": [p for n, p in named if n in decay], "weight_decay": 0.0},
        {"params": [p for n, p in named if n not in decay], "weight_decay": 0.0},
    ]
    optimizer = Shampoo(groups, **options)
    for t in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - t / 6)
        for _ in range(2):
            model(**next(batches)).loss.backward()  # scaled by the number of tokens of both batches
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(trained.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Shampoo", "CASPR", "KFAC", "AdaBK"])
def test_a_factory_names_the_parameters_of_the_model(tmp_path: Path, name: str) -> None:
    from kronbit.integrations import transformers as factories

    factory = getattr(factories, f"{name}Factory")
    options = {"lr": 1e-3, "weight_decay": 0.1, "skip": "*.wpe.*", "optim_args": "bits=8"}
    trained = trainer(tmp_path, (factory, {**options, **EVERY}), max_steps=3)
    trained.train()
    optimizer = unwrapped(trained)
    assert type(optimizer) is factory.optimizer
    assert optimizer.config.bits == 8
    by_name = {
        key: (p, group)
        for group in optimizer.param_groups
        for key, p in zip(group["param_names"], group["params"], strict=True)
    }
    assert by_name.keys() == dict(trained.model.named_parameters()).keys()
    for key, (p, group) in by_name.items():
        assert group["weight_decay"] == (0.1 if p.ndim >= 2 else 0.0), key
        assert group["precondition"] == ("wpe" not in key)
    assert "transformer.h.0.attn.c_attn.weight" in optimizer.summary()
    assert optimizer.memory()["roots"] > 0


@pytest.mark.gpu
def test_steps_skipped_by_the_scaler_of_the_trainer_are_not_counted(tmp_path: Path) -> None:
    class_and_options = Shampoo, {"lr": 1e-3, **EVERY}
    trained = trainer(tmp_path, class_and_options, "cuda", fp16=True, max_steps=12)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**27, growth_interval=1000)
    trained.accelerator.scaler = scaler
    trained.train()
    optimizer = unwrapped(trained)
    skipped = 27 - int(torch.tensor(scaler.get_scale()).log2())
    assert 0 < skipped < 12
    assert {entry["step"] for entry in optimizer.state.values()} == {12 - skipped}
    assert optimizer.diagnostics()["skipped_gradients"] == 0
    assert all(torch.isfinite(p).all() for p in trained.model.parameters())


@pytest.mark.gpu
def test_statistics_exclude_the_scale_of_the_trainer(tmp_path: Path) -> None:
    """The scaler exists before the optimizer, as the docs say, and can be passed to it."""
    from kronbit.integrations.transformers import KFACFactory

    factors = {}
    for amp in ("fp16", "bf16"):
        options = {"lr": 1e-3, "bits": 32, "update_every": 1, "refresh_every": 1}
        trained = trainer(tmp_path, (KFACFactory, options), "cuda", max_steps=1, **{amp: True})
        trained.optimizer_cls_and_kwargs[1]["grad_scaler"] = trained.accelerator.scaler
        trained.train()
        entries = unwrapped(trained).state.values()
        factors[amp] = [blocks_of(entry)["block_0"] for entry in entries if blocks_of(entry)]
    assert len(factors["fp16"]) == 4
    for scaled, plain in zip(factors["fp16"], factors["bf16"], strict=True):
        for side in ("left", "right"):
            assert relative_error(scaled[side]["matrix"], plain[side]["matrix"]) < 0.03


@pytest.mark.parametrize("as_text", [False, True])
def test_options_of_groups_may_be_text(as_text: bool) -> None:
    from kronbit.integrations.transformers import ShampooFactory

    options = {"weight_decay": "0.1", "skip": "*.wpe.*"}
    if as_text:
        options = {"optim_args": "weight_decay=0.1, skip=*.wpe.*"}
    optimizer = ShampooFactory()(gpt2(), lr=1e-3, **options)
    pairs = {(group["weight_decay"], group["precondition"]) for group in optimizer.param_groups}
    assert pairs == {(0.1, True), (0.0, True), (0.1, False)}


@pytest.mark.parametrize("option", ["bits=8", "weight_decay=0.1"])
def test_an_option_given_twice_is_refused(option: str) -> None:
    from kronbit.integrations.transformers import ShampooFactory

    name = option.split("=")[0]
    with pytest.raises(ValueError, match=f"'{name}' is given twice"):
        ShampooFactory()(gpt2(), lr=1e-3, bits=4, weight_decay=0.0, optim_args=option)


def test_the_trainer_example_learns_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    out = "--out", str(tmp_path)
    run_example(monkeypatch, "hf_trainer.py", "--steps", "20", *out, "--optim-args", "bits=8")
    run_example(monkeypatch, "hf_trainer.py", "--steps", "40", *out, "--resume")
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] < 0.7 * losses[0]
    assert "wpe.weight" in output
