r"""Compare the step time of the lab's training loop with that of a hand-written loop.

Usage::

    python benchmarks/speed/lab_loop.py --output result.json \
        [--recipe cifar100-swin-tiny] [--steps 1100]

The script runs a CIFAR-100 recipe as ``kronbit train`` does, with its augmentation, on random
images: eagerly and as a CUDA graph, with the base optimizer alone and with 4-bit Shampoo. The
hand-written loop has one batch on the device, a CUDA graph of the forward and backward pass, and
fused AdamW.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

from kronbit.lab.models import build
from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import Recipe, find_recipe
from kronbit.lab.training.loop import Training
from kronbit.lab.training.measures import hardware, versions
from kronbit.lab.training.terminal import Terminal
from kronbit.lab.training.world import World

WARM_UP = 100


def write_images(folder: Path) -> None:
    """Write a training set and a test set in the layout of CIFAR-100."""
    target = folder / "cifar-100-python"
    target.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 50_000), ("test", 1_000)):
        pixels = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = draw.integers(0, 100, count).tolist()
        (target / name).write_bytes(pickle.dumps({b"data": pixels, b"fine_labels": labels}))


def by_hand(recipe: Recipe, steps: int) -> list[float]:
    """Return milliseconds of every step: a graph of forward and backward pass, then AdamW."""
    options = dict(recipe.model)
    model = build(options.pop("name"), **options).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(recipe.batch, 3, 32, 32, device="cuda")
    y = torch.randint(0, 100, (recipe.batch,), device="cuda")

    def passes() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        functional.cross_entropy(out.float(), y).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            passes()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        optimizer.step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def in_the_lab(recipe: Recipe, spec: str, steps: int, world: World) -> dict[str, Any]:
    """Return step times and peak memory of the lab's loop."""
    settings = {"steps": steps, "amp": "bf16", "eval_every": steps, "eval_batches": 1}
    variant_recipe = variant(spec, recipe.with_settings(settings))[2].with_settings(
        {"watched_blocks": 0}
    )
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        training = Training(variant_recipe, Path(folder), world)
        with Terminal(Console(file=null)) as terminal:
            training.run(terminal, spec, False)
    return {**describe(training.step_ms), "peak_bytes": training.peak.bytes}


def describe(times: list[float]) -> dict[str, Any]:
    times = times[WARM_UP:]
    return {"median_ms": statistics.median(times), "mean_ms": statistics.fmean(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipe", default="cifar100-swin-tiny")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    recipe = find_recipe(arguments.recipe)
    report: dict[str, Any] = {
        "recipe": arguments.recipe,
        "steps": arguments.steps,
        "hardware": hardware(torch.device("cuda")),
        "versions": versions(),
        "by hand": describe(by_hand(recipe, arguments.steps)),
    }
    print("by hand", report["by hand"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        world = World("none", torch.device("cuda"), data=Path(folder))
        modes = {"eager": world, "graph": replace(world, graph=True)}
        if arguments.compile:
            modes["compiled"] = replace(world, compile=True)
            modes["compiled graph"] = replace(world, compile=True, graph=True)
        for mode, how in modes.items():
            for spec in ("base", "shampoo-4"):
                name = f"{mode}, {spec}"
                report[name] = in_the_lab(recipe, spec, arguments.steps, how)
                print(name, report[name], flush=True)
                arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
