"""kronbit's optimizers train, save and resume in the trainers of other packages."""

from __future__ import annotations

import copy
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from support.numerics import relative_error
from support.ranks import run_on_ranks, run_script_on_ranks
from torch import Tensor, nn

from kronbit import KFAC, Shampoo
from kronbit.integrations.strings import read_options
from kronbit.state.binding import blocks_of

EVERY = {"update_every": 2, "refresh_every": 2, "min_quantized_numel": 0}


@pytest.fixture(autouse=True)
def _reset_accelerate() -> Iterator[None]:
    """Reset Accelerate, which keeps the settings of its first use in the process."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def on_gpu(*values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.gpu)


# ---------------------------------------------------------------------------- options as text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bits=4,update_every=10", {"bits": 4, "update_every": 10}),
        ("betas=(0.9, 0.95), lr=1e-3", {"betas": (0.9, 0.95), "lr": 1e-3}),
        ("split_sizes=[64,64],bits=8", {"split_sizes": (64, 64), "bits": 8}),
        ("stagger=True, cuda_graph=false", {"stagger": True, "cuda_graph": False}),
        ("first_refresh=None,method=cholesky", {"first_refresh": None, "method": "cholesky"}),
        ("base='sgd'", {"base": "sgd"}),
        ("skip='head,norm', bits=8", {"skip": "head,norm", "bits": 8}),
        ("pairs=(1,(2,(3,4))),bits=8", {"pairs": (1, (2, (3, 4))), "bits": 8}),
        ("rows=[[1,2],[3,4]],bits=8", {"rows": ([1, 2], [3, 4]), "bits": 8}),
        ("words=('a)b', 2), bits=8", {"words": ("a)b", 2), "bits": 8}),
        ("one=don't,two=can't,bits=8", {"one": "don't", "two": "can't", "bits": 8}),
        ("", {}),
        ({"bits": "4", "lr": 0.1, "method": "eigen"}, {"bits": 4, "lr": 0.1, "method": "eigen"}),
    ],
)
def test_text_becomes_values(text: Any, expected: dict[str, Any]) -> None:
    assert read_options(text) == expected


@pytest.mark.parametrize(
    "text", ["bits", "bits=", "=4", "bits=4,bits=8", "4=bits", "bits 4", "betas=(0.9,1"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"got|twice"):
        read_options(text)


# ------------------------------------------------------------------------------- transformers

transformers = pytest.importorskip("transformers")


class RandomTokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": x, "labels": x}


def gpt2(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 16, "n_embd": width, "n_layer": 1, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def trainer(
    folder: Path,
    optimizer: tuple[Any, dict[str, Any]],
    device: str = "cpu",
    model: nn.Module | None = None,
    **arguments: Any,
) -> Any:
    pytest.importorskip("accelerate")
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "save_steps": 3,
        "lr_scheduler_type": "linear",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
    }
    args = transformers.TrainingArguments(**{**settings, **arguments})
    return transformers.Trainer(
        model=model or gpt2(),
        args=args,
        train_dataset=RandomTokens(),
        optimizer_cls_and_kwargs=optimizer,
    )


def unwrapped(trained: Any) -> Any:
    """Return kronbit's optimizer, without Accelerate's wrapper."""
    return getattr(trained.optimizer, "optimizer", trained.optimizer)


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


# --------------------------------------------------------------------------------- Accelerate


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


# ---------------------------------------------------------------------------------- Lightning


def lightning_module(manual: bool) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
            self.automatic_optimization = not manual

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean()
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_end(self) -> None:
            """Check the step counters while they are still on their devices."""
            states = self.optimizers().optimizer.base.state.values()
            self.counted_on_host = all(state["step"].is_cpu for state in states if "step" in state)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if manual:
                base = torch.optim.SGD(self.parameters(), lr=0.1)
                scaler = getattr(self.trainer.precision_plugin, "scaler", None)
                return KFAC(base, model=self, grad_scaler=scaler, **EVERY)
            return Shampoo(self.parameters(), lr=1e-2, **EVERY)

    return Module()


def fit(folder: Path, manual: bool, device: str, precision: str, **more: Any) -> Any:
    """Train three epochs and save a checkpoint after each."""
    lightning = pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if precision == "16-mixed":  # the initial scale overflows
        from lightning.pytorch.plugins import MixedPrecision

        scaler = torch.amp.GradScaler(device, init_scale=2.0**22, growth_interval=1000)
        arguments: dict[str, Any] = {"plugins": MixedPrecision(precision, device, scaler)}
    else:
        arguments = {"precision": precision}
    x = torch.randn(48, 20, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)
    module = lightning_module(manual)
    trainer = lightning.Trainer(
        accelerator=device,
        devices=1,
        **arguments,
        max_epochs=3,
        callbacks=[callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, **more)
    return module


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cpu", "32-true", id="float32"),
        pytest.param("cpu", "16-mixed", id="fp16"),
        on_gpu("cuda", "32-true", id="cuda-float32"),
        on_gpu("cuda", "bf16-mixed", id="cuda-bf16"),
        on_gpu("cuda", "16-mixed", id="cuda-fp16"),
    ],
)
def test_lightning_trains_and_resumes_bit_identically(
    tmp_path: Path, manual: bool, device: str, precision: str
) -> None:
    """Automatic optimisation runs the passes in a closure; K-FAC uses manual optimisation."""
    uninterrupted = fit(tmp_path / "whole", manual, device, precision)
    optimizer = uninterrupted.optimizers().optimizer
    assert optimizer.memory()["roots"] > 0
    (steps,) = {entry["step"] for entry in optimizer.state.values()}
    assert (10 < steps < 18) if precision == "16-mixed" else steps == 18
    assert optimizer.diagnostics()["skipped_gradients"] == 0
    checkpoint = tmp_path / "whole" / "epoch=1.ckpt"
    resumed = fit(
        tmp_path / "again", manual, device, precision, ckpt_path=checkpoint, weights_only=True
    )
    assert uninterrupted.counted_on_host
    assert resumed.counted_on_host
    for p, q in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_wrapper_of_lightning_can_add_a_group() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
    optimizer = KFAC(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model, **EVERY)
    wrapper = LightningOptimizer(optimizer)
    for t in range(5):
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if t == 0:
            wrapper.add_param_group({"params": list(model[1].parameters())})
    assert blocks_of(optimizer.state[model[1].weight])


def test_replaced_param_groups_load_state() -> None:
    """Lightning's BaseFinetuning replaces the groups before a resumed run loads its state."""
    model, twin = (nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)) for _ in range(2))
    optimizer = KFAC(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model, **EVERY)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    resumed = KFAC(torch.optim.SGD(twin[0].parameters(), lr=0.1), model=twin, **EVERY)
    new = {**resumed.param_groups[0], "params": list(twin[1].parameters())}
    resumed.param_groups = [resumed.param_groups[0], new]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(resumed.state_dict()["state"], optimizer.state_dict()["state"])


# -------------------------------------------------------------------------------------- Hydra


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


# ------------------------------------------------------------------------- peft, timm, examples


@pytest.mark.parametrize(
    ("name", "options", "blocks"),
    [
        ("Shampoo", {}, [1, 2, 2, 1]),  # 4 x 64, 192 x 4, 4 x 256 and 64 x 4, by at most 128
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


EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


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


def test_implementations_for_adamw_of_torchtitan_are_refused() -> None:
    pytest.importorskip("torchtitan")
    from kronbit.integrations.torchtitan import shampoo4bit

    config = shampoo4bit()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match=r"fused_opt_states_bf16.*use 'fused'"):
        config.build(model_parts=[nn.Linear(20, 30)])


@pytest.mark.parametrize("name", ["Shampoo", "CASPR"])
def test_the_import_path_example_learns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--optimizer_type", f"kronbit.{name}", "--optimizer_args", "bits=8", "first_refresh=5"]
    run_example(monkeypatch, "import_path.py", *args, "betas=(0.9, 0.95)", "method='cholesky'")
    lines = re.findall(r"(\w+): loss ([\d.]+) to ([\d.]+)", capsys.readouterr().out)
    assert [kind for kind, _, _ in lines] == [name, "Shampoo"]
    assert all(float(last) < float(first) for _, first, last in lines)


def test_the_lightning_example_learns_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning")
    out = "--out", str(tmp_path)
    run_example(monkeypatch, "lightning_module.py", "--epochs", "2", *out)
    checkpoint = "--checkpoint", str(tmp_path / "epoch=1.ckpt")
    run_example(monkeypatch, "lightning_module.py", "--epochs", "4", *out, *checkpoint)
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)", capsys.readouterr().out, re.M)]
    assert len(losses) == 2
    assert losses[1] < 0.7 * losses[0]
