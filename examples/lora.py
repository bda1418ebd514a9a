"""4-bit Shampoo for LoRA: a small GPT-2 that can count learns to count in twos.

It uses the Trainer of transformers and adapters of peft (needs ``kronbit[hf]`` and ``peft``)::

    python examples/lora.py

Only the low-rank matrices are trained. They form a separate group, with blocks small enough to keep
the state in proportion to the matrices; ``summary()`` shows them.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from kronbit.integrations.transformers import ShampooFactory

NUMBERS = 50


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of equally spaced numbers: 7, 8, 9, ... or 7, 9, 11, ..."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index * 7 + self.by * torch.arange(16)) % NUMBERS
        return {"input_ids": row, "labels": row}


def train(model: torch.nn.Module, data: Counting, steps: int, out: str) -> Trainer:
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=32,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    often = {"first_refresh": 5, "update_every": 10, "refresh_every": 20}  # suits a short run
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        optimizer_cls_and_kwargs=(ShampooFactory, {"lr": 5e-3, **often}),
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--out", default="runs/lora")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=NUMBERS, bos_token_id=0, eos_token_id=0, **sizes)
    model = GPT2LMHeadModel(config)
    train(model, Counting(by=1), arguments.steps, arguments.out)

    targets = ["c_attn", "c_proj", "c_fc"]
    lora = LoraConfig(r=arguments.rank, target_modules=targets, fan_in_fan_out=True)
    adapter_model = get_peft_model(model, lora)
    trainer = train(adapter_model, Counting(by=2), arguments.steps, arguments.out)
    print(trainer.optimizer.optimizer.summary())


if __name__ == "__main__":
    main()
