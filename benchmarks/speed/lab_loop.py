r"""What a step of the lab's loop takes, beside one written by hand.

Usage::

    python benchmarks/speed/lab_loop.py --output result.json \
        [--recipe cifar100-swin-tiny] [--steps 300]

Runs a recipe of CIFAR-100 as the command does, with all of its augmentation, on images of random
bytes: eagerly and as a CUDA graph, by the base alone and with 4-bit Shampoo. The loop by hand has
one batch on the device, forward and backward pass captured as a graph, and fused AdamW.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

from kronbit.lab.models import build
from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import Recipe, find_recipe
from kronbit.lab.training.display import Display
from kronbit.lab.training.interrupts import Interrupts
from kronbit.lab.training.loop import Training
from kronbit.lab.training.measures import hardware, versions
from kronbit.lab.training.running import Running
from kronbit.lab.training.world import World

WARM_UP = 100


def write_images(folder: Path) -> None:
    """A training and a test set in CIFAR's layout."""
    place = folder / "cifar-100-python"
    place.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 50_000), ("test", 1_000)):
        pixels = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = draw.integers(0, 100, count).tolist()
        (place / name).write_bytes(pickle.dumps({b"data": pixels, b"fine_labels": labels}))


def by_hand(recipe: Recipe, steps: int) -> list[float]:
    """Milliseconds of each step: forward and backward as a graph, then AdamW."""
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


def in_the_lab(recipe: Recipe, spec: str, steps: int, running: Running) -> dict[str, Any]:
    """The same by the lab's loop."""
    given = {"steps": steps, "amp": "bf16", "eval_every": steps, "eval_batches": 1}
    made = variant(spec, recipe.with_settings(given))[2].with_settings({"watched_blocks": 0})
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        training = Training(made, Path(folder), World("none", torch.device("cuda")), running)
        with Display(Console(file=nowhere)) as display:
            summary = training.run(display, spec, False, Interrupts())
    return {**described(training.step_ms), "peak_bytes": summary["memory"]["peak"]}


def described(times: list[float]) -> dict[str, Any]:
    own = times[WARM_UP:]
    return {"median_ms": statistics.median(own), "mean_ms": statistics.fmean(own)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipe", default="cifar100-swin-tiny")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    recipe = find_recipe(arguments.recipe)
    found: dict[str, Any] = {
        "recipe": arguments.recipe,
        "steps": arguments.steps,
        "hardware": hardware(torch.device("cuda")),
        "versions": versions(),
        "by hand": described(by_hand(recipe, arguments.steps)),
    }
    print("by hand", found["by hand"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        ways = {"eager": Running(Path(folder)), "graph": Running(Path(folder), graph=True)}
        if arguments.compile:
            ways["compiled"] = Running(Path(folder), compile=True)
            ways["compiled graph"] = Running(Path(folder), compile=True, graph=True)
        for way, running in ways.items():
            for spec in ("base", "shampoo-4"):
                name = f"{way}, {spec}"
                found[name] = in_the_lab(recipe, spec, arguments.steps, running)
                print(name, found[name], flush=True)
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
