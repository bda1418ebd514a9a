"""Check over many steps that memory stays flat and that a repeated run is bit-identical.

Usage::

    python benchmarks/memory/soak.py [--minutes 9.2] [--output result.json]

Every setup runs twice with the same seed. All runs are processes that run at the same time. After
each lap of 500 steps, a run saves its state, sometimes loads it again, and records its memory and a
digest of all weights and state. Some gradients are not finite, and some are missing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import io
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronbit
from kronbit import CASPR, KFAC, Shampoo

BATCH, CLASSES, SEED = 64, 100, 0
# Laps that end with a load: the first ones, after which memory is compared, and some later ones.
FIRST_LOADS, LOAD_EVERY = 5, 20
INTERVAL = 40
SCHEDULE = {"update_every": 10, "refresh_every": INTERVAL}
PAPER = {"method": "eigen", "storage": "paper"}


def network(width: int) -> nn.Sequential:
    """Return a network for 3 x 32 x 32 images; some of its matrices have several blocks."""
    return nn.Sequential(
        nn.Conv2d(3, width // 8, 4, 4),
        nn.GELU(),
        nn.Conv2d(width // 8, width // 4, 2, 2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4 * width, width),
        nn.GELU(),
        nn.Linear(width, 3 * width // 2),
        nn.GELU(),
        nn.Linear(3 * width // 2, width),
        nn.LayerNorm(width),
        nn.Linear(width, CLASSES),
    )


def shampoo(model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Shampoo(base, **SCHEDULE)


def caspr(model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    return CASPR(base, **PAPER, **SCHEDULE, stagger=True, first_refresh=5)


def kfac(model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return KFAC(base, model=model, **SCHEDULE)


# By name: a function that makes the optimizer, and True if forward and backward pass may be a CUDA
# graph. The hooks of K-FAC prevent that.
SETUPS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], bool]] = {
    "Shampoo": (shampoo, True),
    "CASPR, the paper's storage, staggered": (caspr, True),
    "K-FAC": (kfac, False),
}


class Passes:
    """Forward and backward pass in bf16, run eagerly or replayed as a CUDA graph."""

    def __init__(self, model: nn.Module, device: torch.device, captured: bool) -> None:
        self.model, self.device = model, device
        self.teacher = torch.randn(3 * 32 * 32, CLASSES, generator=self._generator(-1))
        self.teacher = self.teacher.to(device)
        self.x = torch.zeros(BATCH, 3, 32, 32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured and device.type == "cuda":
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._run()
            torch.cuda.current_stream().wait_stream(side)
            model.zero_grad()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self._run()
            self.grads = [p.grad for p in model.parameters()]

    @staticmethod
    def _generator(step: int, device: str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(SEED * 2**32 + step + 1)

    def _run(self) -> Tensor:
        y = self.x.flatten(1).mm(self.teacher).argmax(1)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(self.x), y)
        loss.backward()
        return loss.detach()

    def __call__(self, step: int) -> Tensor:
        """Compute the gradients of a step and return its loss."""
        self.x.normal_(generator=self._generator(step, self.device.type))
        if self.graph is None:
            self.model.zero_grad()
            return self._run()
        for p, grad in zip(self.model.parameters(), self.grads, strict=True):
            p.grad = grad
        self.graph.replay()
        return self.loss


def run_laps(setup: str, device: torch.device, width: int, lap: int) -> Iterator[dict[str, Any]]:
    """Train endlessly and yield a record after every lap."""
    make, captured = SETUPS[setup]
    torch.manual_seed(SEED)
    model = network(width).to(device)
    optimizer: Any = make(model)
    passes = Passes(model, device, captured)
    # cuBLAS allocates its workspace (32 MiB) at the first product of a stream and keeps it. Kernels
    # may compute all products for thousands of steps before torch computes one.
    one = torch.ones(1, 1, 1, device=device)
    torch.bmm(one, one)
    params = list(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    step = skipped = 0
    for number in itertools.count():
        for position in range(lap):
            loss = passes(step)
            if position < INTERVAL:  # one parameter has no gradient
                params[(step // lap) % len(params)].grad = None
            grad = params[step % len(params)].grad
            if position % (lap // 4) == 3 and grad is not None:
                grad.view(-1)[0] = torch.nan
                skipped += 1
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * (0.55 + 0.45 * math.cos(math.pi * position / lap))
            optimizer.step()
            step += 1
        in_use = memory(device)
        counts = optimizer.diagnostics()
        # K-FAC counts a bias twice: as a parameter and as part of the matrix of its layer.
        assert skipped <= counts["skipped_gradients"] <= 2 * skipped, counts
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        if number < FIRST_LOADS or number % LOAD_EVERY == 0:
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            skipped = 0  # counters start at zero again
        yield {
            "step": step,
            "loss": float(loss),
            "checkpoint_bytes": len(file.getbuffer()),
            "digest": digest(model, optimizer),
            "memory": in_use,
            "counts": {name: n for name, n in counts.items() if isinstance(n, int) and n},
        }
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all bits of weights and state."""
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                hasher.update(str(key).encode())
                add(value[key])
        elif isinstance(value, Tensor):
            hasher.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            hasher.update(repr(value).encode())

    add(dict(model.named_parameters()))
    add(optimizer.state_dict()["state"])
    return hasher.hexdigest()


def memory(device: torch.device) -> dict[str, int]:
    """Return bytes of tensors (now and at the peak of the lap), reserved bytes, and host bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    if device.type == "cuda":
        # Requested bytes: allocated blocks may be larger by up to a MiB each.
        stats = torch.cuda.memory_stats(device)
        held["tensors"] = stats["requested_bytes.all.current"]
        held["peak"] = stats["requested_bytes.all.peak"]
        held["reserved"] = torch.cuda.memory_reserved(device)
    return held


def drift(held: Sequence[int], after: int = FIRST_LOADS) -> float:
    """Return the largest relative change of memory since the end of the first laps."""
    rest = held[after:]
    return max((abs(size - rest[0]) / rest[0] for size in rest), default=0.0)


def worker(setup: str, seconds: float, width: int, lap: int) -> None:
    """Print a record after every lap until the time is up."""
    end = time.monotonic() + seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # for the passes; the step is deterministic anyway
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for record in run_laps(setup, device, width, lap):
        print(json.dumps(record), flush=True)
        if time.monotonic() > end:
            break


def summary(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise two runs of a setup."""
    both = list(zip(first, second, strict=False))
    memory_of = {
        kind: [[lap["memory"][kind] for lap in laps] for laps in (first, second)]
        for kind in first[0]["memory"]
    }
    return {
        "steps": [first[-1]["step"], second[-1]["step"]],
        "compared_laps": len(both),
        "compared_steps": both[-1][0]["step"],
        "equal": all(one["digest"] == other["digest"] for one, other in both),
        "drift": {kind: max(map(drift, runs)) for kind, runs in memory_of.items()},
        "memory": {kind: runs[0] for kind, runs in memory_of.items()},
        "checkpoint_bytes": first[-1]["checkpoint_bytes"],
        "losses": [first[0]["loss"], first[-1]["loss"]],
        "counts": first[-1]["counts"],
        "last_digest": both[-1][0]["digest"],
    }


def side_by_side(options: list[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the records of both runs of every setup."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number, setup in enumerate([*SETUPS] * 2):
            output = Path(folder) / f"{number}.jsonl"
            command = [sys.executable, __file__, "--worker", setup, *options]
            with output.open("w", encoding="utf-8") as file:
                runs.append((setup, output, subprocess.Popen(command, stdout=file)))
        records: dict[str, list[list[dict[str, Any]]]] = {setup: [] for setup in SETUPS}
        try:
            while any(process.poll() is None for _, _, process in runs):
                if any(process.returncode for _, _, process in runs):
                    break
                time.sleep(1)
            for setup, output, process in runs:
                if process.returncode:
                    raise SystemExit(f"{setup}: exit code {process.returncode}")
                lines = output.read_text(encoding="utf-8").splitlines()
                records[setup].append([json.loads(line) for line in lines])
        finally:
            for _, _, process in runs:
                process.kill()
                process.wait()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lap", type=int, default=500)
    parser.add_argument("--worker", choices=SETUPS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.minutes * 60, arguments.width, arguments.lap)
        return
    start = time.monotonic()
    options = [f"--{name}={getattr(arguments, name)}" for name in ("minutes", "width", "lap")]
    laps = side_by_side(options)
    gpu = torch.cuda.is_available()
    setups = {setup: summary(*runs) for setup, runs in laps.items()}
    result = {
        "hardware": torch.cuda.get_device_name() if gpu else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kronbit": kronbit.__version__,
        "seed": SEED,
        "seconds": round(time.monotonic() - start),
        "lap": arguments.lap,
        "setups": setups,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for setup, figures in setups.items():
        shown = {name: value for name, value in figures.items() if name != "memory"}
        print(f"{setup}: {json.dumps(shown)}")
    wrong = [f"{name}: two runs differ" for name, figures in setups.items() if not figures["equal"]]
    wrong += [
        f"{name}: {kind} moved by {100 * figures['drift'][kind]:.1f} %"
        for name, figures in setups.items()
        for kind in figures["drift"]
        if kind != "host" and figures["drift"][kind] > 0.01  # host memory depends on its allocator
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
