"""A small GPT-2 in transformers' Trainer, options of optimizers, and the examples."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# Without transformers, the tests that import this module are skipped.
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
EVERY = {"update_every": 2, "refresh_every": 2, "min_quantized_numel": 0}


def on_gpu(*values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.gpu)


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


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
