"""Measure what K-FAC and AdaBK cost on a GPU: time by kind of step, hooks, and memory.

Usage::

    python benchmarks/speed/kfac.py --output result.json [--models swin-tiny resnet34]

Statistics are collected before every tenth step, and roots are refreshed at every twentieth. The
medians do not depend on these intervals. "Hooks" compares passes without statistics with those of a
model without an optimizer. The two models take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from models import CASES, Case
from step_time import SCHEDULE, kind_of, milliseconds, prepare

import kronbit
from kronbit import KFAC, AdaBK

STEPS, SETTLED = 120, 40
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "fused": True}
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    f"{kind.__name__} {label}": lambda m, kind=kind, options=options: kind(
        torch.optim.SGD(m.parameters(), **SGD), model=m, **SCHEDULE, **options
    )
    for kind in (KFAC, AdaBK)
    for label, options in (
        ("32-bit", {"bits": 32}),
        ("eigen 4-bit, paper", {"bits": 4, "method": "eigen", "storage": "paper"}),
        ("4-bit", {}),
    )
}


def backward(case: Case, model: torch.nn.Module) -> float:
    """Return milliseconds of a forward and backward pass on a new batch."""
    batch = case.batch()
    model.zero_grad()
    return milliseconds(lambda: case.loss(model, batch).backward())


def measure(case: Case, make: Make) -> dict[str, Any]:
    model = prepare(case)
    optimizer = make(model)
    passes: dict[str, list[float]] = {"ordinary": [], "update": [], "refresh": []}
    steps: dict[str, list[float]] = {"ordinary": [], "update": [], "refresh": []}
    peaks: dict[str, float] = {"ordinary": 0.0, "update": 0.0, "refresh": 0.0}
    for t in range(1, STEPS + 1):
        torch.cuda.reset_peak_memory_stats()
        before = backward(case, model)
        spent = milliseconds(optimizer.step)
        if t > SETTLED:
            kind = kind_of(t)
            passes[kind].append(before)
            steps[kind].append(spent)
            peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated() / 2**20)
    optimizer.zero_grad()
    rest = torch.cuda.memory_allocated() / 2**20
    twin = prepare(case)  # without an optimizer
    ratios = []
    for number in range(STEPS - SETTLED):
        # The model that runs second may have an advantage.
        order = (model, twin) if number % 2 else (twin, model)
        spent = {network: backward(case, network) for network in order}
        ratios.append(spent[model] / spent[twin])
    assert isinstance(optimizer, KFAC)
    counts = optimizer.diagnostics()
    return {
        "forward_backward_ms": {name: statistics.median(times) for name, times in passes.items()},
        "step_ms": {name: statistics.median(times) for name, times in steps.items()},
        "hooks": statistics.median(ratios) - 1,
        "peak_mib": peaks,
        "rest_mib": rest,
        "memory": optimizer.memory(),
        "diagnostics": {k: v for k, v in counts.items() if isinstance(v, int)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=["swin-tiny", "resnet34"])
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kronbit": kronbit.__version__,
        },
        "measured_with": SCHEDULE,
        "models": {},
    }
    for name in arguments.models:
        results = report["models"][name] = {}
        for label in arguments.optimizers:
            result = results[label] = measure(CASES[name], OPTIMIZERS[label])
            spent, before = result["step_ms"], result["forward_backward_ms"]
            memory = result["memory"]
            print(
                f"{name:10} {label:26} step {spent['ordinary']:6.2f} {spent['update']:7.1f} "
                f"{spent['refresh']:7.1f} ms; before it {before['ordinary']:.1f} "
                f"({100 * result['hooks']:+.1f} % over a model without optimizer), with statistics "
                f"{before['update']:.1f}; second order "
                f"{(memory['statistics'] + memory['roots']) / 2**20:.0f} MiB, rest "
                f"{result['rest_mib']:.0f}, peak {max(result['peak_mib'].values()):.0f}",
                flush=True,
            )
            if arguments.output:
                arguments.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
