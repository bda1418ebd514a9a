"""Train GPT-2 on token files with AdamW alone, and with Shampoo in every storage.

Usage::

    python benchmarks/training/gpt2.py --train train.bin --val val.bin --output result.json

The files hold GPT-2 tokens as uint16, as nanoGPT writes them (``.xz`` is decompressed). Needs a
CUDA device, numpy and transformers. The default is GPT-2 124M with 8 x 1024 tokens per step. All
runs use bf16 autocast, gradients clipped at 1, warm-up over a twentieth of the steps (at least 40),
linear decay to 0, and the same data in the same order.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import kronbit
from kronbit import Shampoo

WARM_UP, VALIDATION_TOKENS = 40, 160 * 1024
BASE: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95), "fused": True}
SCHEDULE: dict[str, Any] = {"first_refresh": 20, "update_every": 50, "refresh_every": 100}
EIGEN: dict[str, Any] = {"bits": 4, "method": "eigen"}
CHOLESKY: dict[str, Any] = {"method": "cholesky", "storage": "compact"}
# Options of Shampoo; ``None`` is AdamW alone.
OPTIMIZERS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "32-bit": {"bits": 32},
    "32-bit, 30 Newton steps": {"bits": 32, "newton_steps": 30},
    "4-bit naive": {"bits": 4, "method": "naive", "storage": "paper"},
    "4-bit eigen (paper)": {**EIGEN, "storage": "paper"},
    "4-bit eigen, compact": {**EIGEN, "storage": "compact"},
    "4-bit cholesky, compact": {"bits": 4, **CHOLESKY},
    "6 + 4-bit cholesky, compact": {"bits": 6, "root_bits": 4, **CHOLESKY},
    "8-bit cholesky, compact": {"bits": 8, **CHOLESKY},
}


@dataclass(frozen=True)
class Recipe:
    """Sizes of the network and of a step."""

    layers: int
    width: int
    batch: int
    length: int
    steps: int
    lr: float

    def model(self) -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=50304,
            n_positions=self.length,
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.width // 64,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(config).cuda()

    def optimizer(self, model: nn.Module, name: str) -> torch.optim.Optimizer:
        options = OPTIMIZERS[name]
        if options is None:
            return torch.optim.AdamW(model.parameters(), lr=self.lr, **BASE)
        return Shampoo(model.parameters(), lr=self.lr, **options, **BASE, **SCHEDULE)

    def draw(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        starts = torch.randint(0, len(tokens) - self.length, (self.batch,), generator=generator)
        return torch.stack([tokens[i : i + self.length] for i in starts.tolist()]).long()


def read_tokens(path: Path) -> Tensor:
    raw = path.read_bytes()
    raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.int32)).cuda()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(batch, labels=batch).loss


def run(recipe: Recipe, name: str, tokens: dict[str, Tensor], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    steps = recipe.steps
    model = recipe.model()
    optimizer = recipe.optimizer(model, name)
    warm_up = max(WARM_UP, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / warm_up) * (1 - t / steps)
    )
    generator = torch.Generator().manual_seed(seed)
    losses, milliseconds = [], []
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        loss = loss_of(model, recipe.draw(tokens["train"], generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.cuda.synchronize()
        before = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - before))
        schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated()
    generator = torch.Generator().manual_seed(10**6)
    with torch.no_grad():
        validation = [
            loss_of(model, recipe.draw(tokens["val"], generator)).item()
            for _ in range(VALIDATION_TOKENS // (recipe.batch * recipe.length))
        ]
    result: dict[str, Any] = {
        "validation_loss": statistics.mean(validation),
        "training_loss": statistics.mean(losses[-50:]),
        "optimizer_step_median_ms": statistics.median(milliseconds),
        "optimizer_step_max_ms": max(milliseconds),
        "seconds": seconds,
        "peak_mib": peak / 2**20,
    }
    if isinstance(optimizer, Shampoo):
        result["memory"] = optimizer.memory()
        counts = optimizer.diagnostics()
        result["diagnostics"] = {k: v for k, v in counts.items() if k != "groups"}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("train", "val", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    defaults = {"layers": 12, "width": 768, "batch": 8, "length": 1024, "steps": 400}
    for name, size in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    sizes = {field.name: getattr(arguments, field.name) for field in fields(Recipe)}
    recipe = Recipe(**sizes)
    tokens = {name: read_tokens(getattr(arguments, name)) for name in ("train", "val")}
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kronbit": kronbit.__version__,
        "recipe": sizes,
        "tokens": {name: len(t) for name, t in tokens.items()},
        "base": BASE,
        "schedule": SCHEDULE,
        "runs": {},
    }
    for seed in arguments.seeds:
        for name in arguments.optimizers:
            result = run(recipe, name, tokens, seed)
            report["runs"].setdefault(name, {})[seed] = result
            print(f"{name:24} seed {seed}  validation {result['validation_loss']:.4f}", flush=True)
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
