"""4-bit Shampoo in the Trainer of transformers: a small GPT-2 learns to count.

Run it, and resume from its last checkpoint (needs ``kronbit[hf]``)::

    python examples/hf_trainer.py --optim-args "bits=8,update_every=10"
    python examples/hf_trainer.py --steps 120 --resume

A factory sees the model, so parameters have names, and the position embedding can be left to AdamW.
``(Shampoo, {"lr": 1e-3})`` also works.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from kronbit.integrations.transformers import ShampooFactory

NUMBERS = 50


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of consecutive numbers: 7, 8, 9, ..."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index * 7 + torch.arange(16)) % NUMBERS
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/hf_trainer")
    parser.add_argument("--optim-args", default="", help="options of the optimizer, as text")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    command_line = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=NUMBERS, bos_token_id=0, eos_token_id=0, **sizes)
    arguments = TrainingArguments(
        output_dir=command_line.out,
        max_steps=command_line.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        logging_steps=20,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    # The learning rate belongs here: Trainer does not pass on its arguments.
    options = {
        "lr": 3e-3,
        "weight_decay": 0.01,
        "skip": "*.wpe.*",
        "first_refresh": 5,
        "optim_args": command_line.optim_args,
    }
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Counting(),
        optimizer_cls_and_kwargs=(ShampooFactory, options),
    )
    trainer.train(resume_from_checkpoint=command_line.resume)
    print(trainer.optimizer.optimizer.summary())


if __name__ == "__main__":
    main()
