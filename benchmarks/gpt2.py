"""GPT-2 124M on token files: AdamW alone, and with 32-bit, naive 4-bit and 4-bit Shampoo.

Usage::

    python benchmarks/gpt2.py --train train.bin --val val.bin --output result.json

The files hold GPT-2 tokens as uint16, as nanoGPT writes them (``.xz`` is unpacked). Needs a CUDA
device, numpy and transformers. 8 x 1024 tokens per step, bf16 autocast, gradients clipped at 1,
lr 6e-4 with 40 steps of warm-up and linear decay to 0, the same data in the same order for all.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import kronbit
from kronbit import Shampoo

BATCH, LENGTH, WARM_UP, VALIDATION_BATCHES = 8, 1024, 40, 20
BASE: dict[str, Any] = {"lr": 6e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "fused": True}
SCHEDULE: dict[str, Any] = {"first_refresh": 20, "update_every": 50, "refresh_every": 100}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), **BASE),
    "32-bit shampoo": lambda m: Shampoo(m.parameters(), bits=32, **BASE, **SCHEDULE),
    "4-bit shampoo": lambda m: Shampoo(m.parameters(), bits=4, **BASE, **SCHEDULE),
    "4-bit shampoo (naive)": lambda m: Shampoo(
        m.parameters(), bits=4, method="naive", **BASE, **SCHEDULE
    ),
}


def read_tokens(path: Path) -> Tensor:
    raw = path.read_bytes()
    raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.int32)).cuda()


def draw(tokens: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(tokens) - LENGTH, (BATCH,), generator=generator).tolist()
    return torch.stack([tokens[start : start + LENGTH] for start in starts]).long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(batch, labels=batch).loss


def run(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    tokens: dict[str, Tensor],
    steps: int,
    seed: int,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=50304, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).cuda()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / WARM_UP) * (1 - t / steps)
    )
    generator = torch.Generator().manual_seed(seed)
    losses, milliseconds = [], []
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        loss = loss_of(model, draw(tokens["train"], generator))
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
            loss_of(model, draw(tokens["val"], generator)).item() for _ in range(VALIDATION_BATCHES)
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
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("train", "val", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    tokens = {name: read_tokens(getattr(arguments, name)) for name in ("train", "val")}
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kronbit": kronbit.__version__,
        "steps": arguments.steps,
        "tokens": {name: len(t) for name, t in tokens.items()},
        "base": BASE,
        "schedule": SCHEDULE,
        "runs": {},
    }
    for seed in arguments.seeds:
        for name, make in OPTIMIZERS.items():
            result = run(make, tokens, arguments.steps, seed)
            report["runs"].setdefault(name, {})[seed] = result
            print(f"{name:24} seed {seed}  validation {result['validation_loss']:.4f}", flush=True)
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
