"""Muon as a baseline of the lab: torch's optimizer on hidden matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.numerics import slow

from kronbit.lab import checkpoints
from kronbit.lab.errors import LabError
from kronbit.lab.models import build
from kronbit.lab.muon import MuonBesideBase, hidden_matrices
from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import Recipe, find_recipe, parse_settings
from kronbit.lab.training.loop import Training
from kronbit.lab.training.terminal import Terminal
from kronbit.lab.training.world import World

KEYWORDS = {"lr": 3e-3, "weight_decay": 0.05}


def recipe_of(*settings: str) -> Recipe:
    given = ["optimizer=muon", "steps=8", "batch=20", "model.depth=2", "data.crop=0", *settings]
    return find_recipe("digits-vit").with_settings(parse_settings(given))


def trained(recipe: Recipe, folder: Path, device: str = "cpu", resume: bool = False) -> Training:
    training = Training(recipe, folder, World("none", torch.device(device)))
    folder.mkdir(exist_ok=True)
    with Terminal(Console(quiet=True)) as terminal:
        training.run(terminal, "test", resume)
    return training


def test_hidden_matrices_are_weights_of_all_linear_layers_except_the_last() -> None:
    swin = dict(hidden_matrices(build("swin-tiny", classes=10)))
    assert len(swin) == 12 * 4 + 3  # qkv, out and two of the MLP; three merging layers
    assert "head.weight" not in swin
    assert not any("bias" in name for name in swin)
    small = {"vocab_size": 50, "n_positions": 8, "n_layer": 2, "n_embd": 16, "n_head": 2}
    gpt2 = dict(hidden_matrices(build("gpt2", **small)))
    assert len(gpt2) == 2 * 4
    assert not any("wte" in name or "wpe" in name or "lm_head" in name for name in gpt2)


def test_both_optimizers_take_the_same_steps_as_separately() -> None:
    torch.manual_seed(0)
    options = dict(find_recipe("digits-vit").model)
    name = options.pop("name")
    models = [build(name, **options) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    together = MuonBesideBase(models[0], "adamw", KEYWORDS)
    hidden = dict(hidden_matrices(models[1]))
    rest = [p for name, p in models[1].named_parameters() if name not in hidden]
    muon = torch.optim.Muon(hidden.values(), adjust_lr_fn="match_rms_adamw", **KEYWORDS)
    adamw = torch.optim.AdamW(rest, **KEYWORDS)
    for step in range(3):
        x, y = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
        for model, optimizers in zip(models, ([together], [muon, adamw]), strict=True):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 / (step + 1)  # a schedule changes both
                optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_run_resumes_bit_for_bit(device: str, tmp_path: Path) -> None:
    recipe = recipe_of("checkpoint_every=4", "keep=5", "log_every=2")
    trained(recipe, tmp_path / "whole", device)
    trained(recipe, tmp_path / "parts", device)
    checkpoints.checkpoints(tmp_path / "parts")[-1].unlink()  # as if it crashed after step 4
    trained(recipe, tmp_path / "parts", device, resume=True)
    resumed, expected = (checkpoints.load_last(tmp_path / name) for name in ("parts", "whole"))
    assert resumed["step"] == expected["step"] == 8
    for name, value in expected["model"].items():
        assert torch.equal(resumed["model"][name], value), name
    for index, state in expected["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(resumed["optimizer"]["state"][index][name], value), (index, name)
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("parts", "whole")
    ]
    assert losses[0] == losses[1]


def test_a_network_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(LabError, match=r"muon is for hidden linear layers, and the model has none"):
        MuonBesideBase(build("resnet34", classes=10), "sgd", {"lr": 0.1})


def test_muon_is_a_variant_of_comparisons() -> None:
    key, label, made = variant("muon lr=2e-3", find_recipe("wiki-gpt2-124m"))
    assert (key, label) == ("muon-lr=2e-3", "Muon, lr=2e-3")
    assert (made.optimizer, made.lr) == ("muon", 2e-3)
