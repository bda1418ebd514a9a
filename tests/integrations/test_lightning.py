"""Lightning trains and resumes with automatic and manual optimisation."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from support.trainers import EVERY, on_gpu, run_example
from torch import Tensor, nn

from kronbit import KFAC, Shampoo
from kronbit.state.binding import blocks_of


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
