r"""Find the batch sizes at which LLaMA2-7B and its second-order state fit on one GPU of 80 GB.

Usage::

    python benchmarks/memory/llama7b_memory.py --output result.json \
        [--batches 64 128 256] [--layers 32]

The setting is that of the paper's memory table: bf16, sequences of 256 tokens, gradient
checkpointing, and 8-bit AdamW, alone and as the base of Shampoo with blocks of order 2048. Every
optimizer runs in a separate process, whose allocator is limited to 81,920 MiB. The process
increases the batch size until the model no longer fits. At each batch size it takes four steps; at
least one of them updates and refreshes. Weights and tokens are random. Needs a CUDA device,
transformers, and bitsandbytes or torchao.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import kronbit
from kronbit import Shampoo
from kronbit.base import resolve

LIMIT_MIB, LENGTH, VOCABULARY = 81_920, 256, 32_000
OPTIONS = {"update_every": 3, "refresh_every": 3, "max_order": 2048}
COMPACT: dict[str, Any] = {"bits": 4, "storage": "compact"}
OPTIMIZERS: dict[str, dict[str, Any] | None] = {
    "8-bit adamw": None,
    "+ 32-bit shampoo": {"bits": 32},
    "+ 4-bit shampoo (paper)": {"bits": 4, "method": "eigen", "storage": "paper"},
    "+ 4-bit shampoo, compact": {**COMPACT, "method": "eigen"},
    "+ 4-bit shampoo, cholesky, compact": {**COMPACT, "method": "cholesky"},
}


def make_model(layers: int) -> torch.nn.Module:
    """Return LLaMA2-7B with the given number of layers, in bf16."""
    config = transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable()
    return model.train()


def make_optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    options = OPTIMIZERS[name]
    if options is None:
        return resolve(model.parameters(), "adamw8bit", {"lr": 1e-5})
    return Shampoo(model.parameters(), base="adamw8bit", lr=1e-5, **OPTIONS, **options)


def four_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Any:
    """Return the memory peaks and seconds of four steps; at least one updates and refreshes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    figures: dict[str, Any] = {"fits": True, "seconds": []}
    try:
        for _ in range(4):
            tokens = torch.randint(VOCABULARY, (batch, LENGTH), device="cuda")
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.cuda.synchronize()
            before = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            figures["seconds"].append((before - start, time.perf_counter() - before))
            optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        figures |= {"fits": False, "refused": str(error).split(". ")[0]}
    figures["peak_allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
    figures["peak_reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
    return figures


def run(name: str, batches: list[int], layers: int) -> None:
    """Print a line of JSON for every batch size of one optimizer."""
    total = torch.cuda.get_device_properties(0).total_memory / 2**20
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_MIB / total))
    torch.manual_seed(0)
    model = make_model(layers)
    optimizer = make_optimizer(model, name)
    for batch in batches:
        figures = four_steps(model, optimizer, batch)
        if figures["fits"] and isinstance(optimizer, Shampoo):
            figures["memory"] = optimizer.memory()
        print(json.dumps([batch, figures]), flush=True)
        if not figures["fits"]:
            return  # larger batches do not fit either


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    parser.add_argument("--here", action="store_true", help="run one optimizer in this process")
    arguments = parser.parse_args()
    if arguments.here:
        run(arguments.optimizers[0], arguments.batches, arguments.layers)
        return
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            module.__name__: module.__version__ for module in (torch, transformers, kronbit)
        },
        "limit_mib": LIMIT_MIB,
        "length": LENGTH,
        "layers": arguments.layers,
        "runs": {},
    }
    for name in arguments.optimizers:
        command = [sys.executable, __file__, "--here", "--layers", str(arguments.layers)]
        command += ["--optimizers", name, "--batches", *map(str, arguments.batches)]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        for line in process.stdout.splitlines():
            if line.startswith("["):
                batch, figures = json.loads(line)
                report["runs"].setdefault(name, {})[batch] = figures
                print(f"{name}, batch {batch}: {figures}", flush=True)
        if process.returncode:
            print(f"{name}: exit code {process.returncode}", flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
