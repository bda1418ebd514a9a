r"""Compare the step times of several versions of kronbit, in turn on one device.

Usage::

    python benchmarks/speed/versions.py --output result.json before=../before/src after=src

Each version runs in a separate process, with its source folder in ``PYTHONPATH``. The speed of a
machine changes within seconds, so the versions take turns, each of one interval between refreshes.
The time of ``optimizer.step()`` around fused AdamW is measured until the device is idle. The ratios
are relative to the first version. Swin-Tiny and GPT-2 are for a GPU; GPT-2 needs transformers.

``--import-times`` also measures ``import kronbit`` in new processes, in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEDULE = {"update_every": 10, "refresh_every": 20}
ADAMW: dict[str, Any] = {"base": "adamw", "lr": 1e-4, "weight_decay": 0.05, "fused": True}
KINDS = ("ordinary", "update", "refresh")
WARM_UP = 4  # turns that do not count
MODELS = ("mlp", "swin-tiny", "gpt2-124m")


def make_passes(name: str, device: str) -> tuple[Any, Callable[[], Any]]:
    """Return a network, and a function that computes its loss on new random data."""
    import torch
    from torch import nn
    from torch.nn import functional

    from kronbit.lab.models import build

    torch.manual_seed(0)
    if name == "gpt2-124m":
        model = build("gpt2", vocab_size=50304).to(device)

        def loss() -> Any:
            ids = torch.randint(0, 50304, (8, 1024), device=device)
            with torch.autocast(device, dtype=torch.bfloat16):
                return model(input_ids=ids, labels=ids).loss

        return model, loss
    layers = [nn.Flatten(), nn.Linear(3 * 32 * 32, 128), *(nn.Linear(128, 128) for _ in range(8))]
    model = (build("swin-tiny") if name == "swin-tiny" else nn.Sequential(*layers)).to(device)

    def loss() -> Any:
        x = torch.randn(128, 3, 32, 32, device=device)
        return functional.cross_entropy(model(x), torch.randint(0, 100, (128,), device=device))

    return model, loss


def work() -> None:
    """Take a turn for every line of stdin, and print the milliseconds of its steps."""
    import torch

    import kronbit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.get_device_module(device).synchronize
    answers, sys.stdout = sys.stdout, sys.stderr  # packages may print
    environment = {"torch": torch.__version__, "kernels": os.environ.get("KRONBIT_KERNELS", "1")}
    environment |= {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    print(json.dumps(environment), file=answers, flush=True)
    name = None
    for line in sys.stdin:
        if line.strip() != name:
            name = line.strip()
            model = optimizer = None
            gc.collect()
            torch.cuda.empty_cache()
            model, loss = make_passes(name, device)
            optimizer = kronbit.Shampoo(model.parameters(), bits=4, **ADAMW, **SCHEDULE)
        times = []
        for _ in range(SCHEDULE["refresh_every"]):
            optimizer.zero_grad()
            loss().backward()
            synchronize()
            start = time.perf_counter()
            optimizer.step()
            synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        print(json.dumps(times), file=answers, flush=True)


class Version:
    """A process that runs one version of kronbit."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.environment = {**os.environ, "PYTHONPATH": source}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, model: str) -> None:
        assert self._process.stdin is not None
        print(model, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


def measure(versions: list[Version], model: str, turns: int) -> dict[str, Any]:
    """Return the median times of each version by kind of step, and their ratios."""
    for _ in range(WARM_UP):  # all versions at once: most of the time is compilation
        for version in versions:
            version.ask(model)
        for version in versions:
            version.answer()
    times: dict[str, dict[str, list[float]]] = {
        version.name: {kind: [] for kind in KINDS} for version in versions
    }
    for _ in range(turns):
        for version in versions:
            version.ask(model)
            for t, spent in enumerate(version.answer(), 1):
                kind = "ordinary" if t % SCHEDULE["update_every"] else "update"
                kind = "refresh" if t == SCHEDULE["refresh_every"] else kind
                times[version.name][kind].append(spent)
    medians = {
        name: {kind: statistics.median(values) for kind, values in of_kind.items()}
        for name, of_kind in times.items()
    }
    first = medians[versions[0].name]
    ratios = {
        name: {kind: of_kind[kind] / first[kind] for kind in KINDS}
        for name, of_kind in medians.items()
    }
    return {"ms": medians, "ratio": ratios, "turns": turns}


def import_times(versions: list[Version], repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of ``import kronbit`` after torch, by version."""
    code = (
        "import time, torch; start = time.perf_counter(); import kronbit; "
        "print(time.perf_counter() - start)"
    )
    times: dict[str, list[float]] = {version.name: [] for version in versions}
    for _ in range(repeats):
        for version in versions:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=version.environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            times[version.name].append(float(done.stdout))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="NAME=SOURCE")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS[1:])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--import-times", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    versions = [Version(*item.split("=", 1)) for item in arguments.versions]
    report: dict[str, Any] = {version.name: version.answer() for version in versions}
    for model in arguments.models:
        report[model] = measure(versions, model, arguments.turns)
        for name, of_kind in report[model]["ms"].items():
            ratios = report[model]["ratio"][name]
            cells = (f"{kind} {ms:8.2f} ms ({ratios[kind]:.3f})" for kind, ms in of_kind.items())
            print(f"{model:12} {name:12}", *cells, flush=True)
    for version in versions:
        version.end()
    if arguments.import_times:
        report["import_s"] = import_times(versions)
        print("import kronbit", report["import_s"])
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
