"""Measure the spread of step times on one GPU, with all blocks due at one step or staggered.

Usage::

    python benchmarks/speed/stagger.py --output result.json [--model gpt2-124m] [--steps 1000]

The script times whole training steps (forward, backward, optimizer) and synchronises with the GPU
after each. It ignores the first three intervals, in which kernels are compiled and graphs are
captured. The host occasionally causes a slow step. The report therefore has both the slowest step
and the slowest position in the interval, by the median over all intervals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from models import CASES, Case
from step_time import ADAMW, PAPER, prepare

import kronbit
from kronbit import Shampoo

RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "together": {"stagger": False},
    "staggered": {"stagger": True},
}


def run(case: Case, steps: int, every: int, **options: Any) -> dict[str, Any]:
    model = prepare(case)
    if options:
        schedule = {"update_every": every, "refresh_every": every}
        optimizer: torch.optim.Optimizer = Shampoo(
            model.parameters(), **PAPER, **ADAMW, **schedule, **options
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    times = []
    for _ in range(3 * every + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        case.loss(model, case.batch()).backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    counted = dict(list(enumerate(times, 1))[3 * every :])
    times = list(counted.values())
    median = statistics.median(times)
    positions = [
        statistics.median(ms for t, ms in counted.items() if t % every == position)
        for position in range(every)
    ]
    slowest = sorted(counted, key=counted.__getitem__, reverse=True)[:20]
    return {
        "median_ms": median,
        "mean_ms": statistics.mean(times),
        "slowest_ms": max(times),
        "slowest_over_median": max(times) / median,
        "slowest_place_over_median": max(positions) / median,
        "slowest_steps": {t: counted[t] for t in slowest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=list(CASES), default="gpt2-124m")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=200, help="T1 = T2")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    arguments = parser.parse_args()
    case = CASES[arguments.model]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kronbit": kronbit.__version__,
        "model": arguments.model,
        "steps": arguments.steps,
        "every": arguments.every,
    }
    for name in arguments.runs:
        report[name] = run(case, arguments.steps, arguments.every, **RUNS[name])
        print(name, report[name], flush=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
