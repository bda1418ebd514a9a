r"""Compare the step times of several versions of kronbit, in turn on one device.

Usage::

    python benchmarks/speed/versions.py --output result.json before=../before/src after=src

Each version runs in a separate process, with its source folder in ``PYTHONPATH``. The speed of a
machine changes within seconds, so the versions take turns: a turn is one interval between
refreshes. The time of ``optimizer.step()`` around fused AdamW is measured until the device is idle.
The ratios are relative to the first version. Swin-Tiny and GPT-2 are for a GPU; GPT-2 needs
transformers.

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
from typing import Any, TypeAlias

SCHEDULE = {"update_every": 10, "refresh_every": 20}
ADAMW: dict[str, Any] = {"base": "adamw", "lr": 1e-4, "weight_decay": 0.05, "fused": True}
KINDS = ("ordinary", "device", "update", "refresh")
SLEEP = 40_000_000  # cycles in which the host can launch a whole step
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
        for t in range(1, SCHEDULE["refresh_every"] + 1):
            optimizer.zero_grad()
            loss().backward()
            synchronize()
            kind = "ordinary" if t % SCHEDULE["update_every"] else "update"
            kind = "refresh" if t == SCHEDULE["refresh_every"] else kind
            if kind == "ordinary" and t % 2 and device == "cuda":
                times.append(("device", device_time(optimizer.step)))
                continue
            start = time.perf_counter()
            optimizer.step()
            synchronize()
            times.append((kind, 1e3 * (time.perf_counter() - start)))
        print(json.dumps(times), file=answers, flush=True)


def device_time(step: Callable[[], object]) -> float:
    """Return the milliseconds that the GPU needs for a step that is launched while it sleeps."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


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
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} has failed; its error is above")
        return json.loads(line)

    def end(self) -> None:
        self._process.communicate()


Times: TypeAlias = dict[str, dict[str, list[float]]]  # of each version and each kind of step


def measure(versions: list[Version], model: str, turns: int, times: Times) -> None:
    """Let the versions take turns, and add their times."""
    for _ in range(WARM_UP):  # together: most of it is compilation
        for version in versions:
            version.ask(model)
        for version in versions:
            version.answer()
    for _ in range(turns):
        for version in versions:
            version.ask(model)
            for kind, spent in version.answer():
                times[version.name][kind].append(spent)


def medians(times: Times) -> dict[str, Any]:
    """Return the median times of each version by kind of step, and their ratios to the first."""
    ms = {
        name: {kind: statistics.median(values) for kind, values in of_kind.items() if values}
        for name, of_kind in times.items()
    }
    first = next(iter(ms.values()))
    ratios = {
        name: {kind: value / first[kind] for kind, value in of_kind.items()}
        for name, of_kind in ms.items()
    }
    return {"ms": ms, "ratio": ratios, "steps": len(next(iter(times.values()))["ordinary"])}


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
    parser.add_argument("--turns", type=int, default=5, help="of each version in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--import-times", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    sources = dict(item.split("=", 1) for item in arguments.versions)
    times: dict[str, Times] = {
        model: {name: {kind: [] for kind in KINDS} for name in sources}
        for model in arguments.models
    }
    report: dict[str, Any] = {"rounds": arguments.rounds}
    for _ in range(arguments.rounds):
        versions = [Version(name, source) for name, source in sources.items()]
        report |= {version.name: version.answer() for version in versions}
        for model in arguments.models:
            measure(versions, model, arguments.turns, times[model])
            report[model] = medians(times[model])
        for version in versions:
            version.end()
    for model in arguments.models:
        for name, of_kind in report[model]["ms"].items():
            ratios = report[model]["ratio"][name]
            cells = (f"{kind} {ms:8.2f} ms ({ratios[kind]:.3f})" for kind, ms in of_kind.items())
            print(f"{model:12} {name:12}", *cells, flush=True)
    if arguments.import_times:
        report["import_s"] = import_times(versions)
        print("import kronbit", report["import_s"])
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
