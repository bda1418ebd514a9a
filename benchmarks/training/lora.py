"""Train low-rank adapters with AdamW alone, and with Shampoo around it in blocks of several orders.

Usage::

    python benchmarks/training/lora.py [--output result.json]

A small character GPT is trained on the Python reference and then adapted to Python source (modules
of the standard library) with LoRA by peft. All rows use the same learning rate: of four, the one at
which AdamW alone is best. The script takes about fifteen minutes on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sysconfig
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import peft
import torch
from torch import nn

import kronbit
from kronbit import Shampoo
from kronbit.lab.data.images import Setting
from kronbit.lab.data.tokens import ASCII, Tokens, pydoc
from kronbit.lab.models.language import gpt2
from kronbit.lab.training.measures import hardware

LENGTH, BATCH, STEPS, FIRST_STEPS = 64, 32, 300, 600
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SCHEDULE = {"first_refresh": 10, "update_every": 10, "refresh_every": 50}
# Options of Shampoo (None: AdamW alone), and the text in the names of preconditioned parameters.
ROWS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "AdamW": (None, ""),
    "+ Shampoo, max_order=1200": ({"max_order": 1200}, "lora_"),
    "+ Shampoo, max_order=256": ({"max_order": 256}, "lora_"),
    "+ Shampoo, max_order=128": ({"max_order": 128}, "lora_"),
    "+ Shampoo, max_order=64": ({"max_order": 64}, "lora_"),
    "+ Shampoo, max_order=32": ({"max_order": 32}, "lora_"),
    "+ Shampoo, A alone": ({"max_order": 1200}, "lora_A"),
    "+ Shampoo, B alone": ({"max_order": 1200}, "lora_B"),
}


def source(setting: Setting) -> Tokens:
    """Return the modules of the standard library as characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    encoded = np.frombuffer(joined.decode("utf-8").encode("ascii", "replace"), dtype=np.uint8)
    first = int(0.9 * len(encoded))
    return Tokens(setting, encoded[:first], encoded[first:], LENGTH, ASCII)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tokens, steps: int) -> float:
    """Train with warm-up over a tenth of the steps and linear decay; return the held-out loss."""
    warmup = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warmup, (steps - t) / (steps - warmup))
    )
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, *data.batch(t)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return evaluate(model, data)


@torch.no_grad()
def evaluate(model: nn.Module, data: Tokens) -> float:
    """Return the held-out loss."""
    batches = zip(range(32), data.held_out(), strict=False)
    return mean(float(loss_of(model, x, y)) for _, (x, y) in batches)


def adapt(model: nn.Module, row: str, lr: float, seed: int) -> dict[str, float]:
    """Adapt a copy of the model; return its loss and the bytes of second-order state."""
    torch.manual_seed(seed)
    targets = ["c_attn", "c_proj", "c_fc"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=True)
    adapter = peft.get_peft_model(copy.deepcopy(model), config)
    options, preconditioned = ROWS[row]
    named = [(name, p) for name, p in adapter.named_parameters() if p.requires_grad]
    setting = Setting(Path(), BATCH, seed, torch.device("cpu"), 0, 1)
    if options is None:
        adamw = torch.optim.AdamW([p for _, p in named], lr=lr)
        return {"loss": train(adapter, adamw, source(setting), STEPS), "second_order_bytes": 0}
    groups = [
        {"params": [p for name, p in named if (preconditioned in name) == inside], **more}
        for inside, more in ((True, {}), (False, {"precondition": False}))
    ]
    optimizer = Shampoo([g for g in groups if g["params"]], lr=lr, **options, **SCHEDULE)
    loss = train(adapter, optimizer, source(setting), STEPS)
    memory = optimizer.memory()
    return {"loss": loss, "second_order_bytes": memory["statistics"] + memory["roots"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = gpt2(vocab_size=ASCII, n_positions=LENGTH, n_layer=3, n_embd=128, n_head=4)
    setting = Setting(Path(), BATCH, 0, torch.device("cpu"), 0, 1)
    first = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    reference = train(model, first, pydoc(setting, LENGTH), FIRST_STEPS)
    before = evaluate(model, source(setting))
    print(f"reference {reference:.3f}, source before {before:.3f}", flush=True)
    rates = {lr: adapt(model, "AdamW", lr, 0)["loss"] for lr in RATES}
    best = min(rates, key=rates.__getitem__)
    print(f"AdamW by learning rate: {rates}", flush=True)
    rows = {}
    for row in ROWS:
        by_seed = [adapt(model, row, best, seed) for seed in (0, 1)]
        rows[row] = {
            "losses": [outcome["loss"] for outcome in by_seed],
            "second_order_bytes": by_seed[0]["second_order_bytes"],
        }
        print(f"{row:28} {rows[row]}", flush=True)
    result = {
        "hardware": hardware(torch.device("cpu")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peft": peft.__version__,
        "kronbit": kronbit.__version__,
        "reference_loss": reference,
        "before": before,
        "rates": {str(lr): loss for lr, loss in rates.items()},
        "lr": best,
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
