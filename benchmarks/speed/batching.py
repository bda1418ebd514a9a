"""On the CPU: an update of all blocks in batches, against the literal loop over matrices.

Usage::

    python benchmarks/speed/batching.py [--output result.json]

Swin-Tiny's shapes, 4 bits, fresh gradients at each update. The loop is the transcription of the
paper that the tests compare with (``tests/support/oracle.py``), in float32, one matrix of each
order timed
and counted as often as it occurs. A ratio within one run: the machine's load matters little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import kronbit
from kronbit import Shampoo
from kronbit.blocks.groups import Due
from kronbit.lab.models.swin import SwinTiny
from kronbit.statistics import GradientStatistics
from kronbit.statistics.base import Source
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import oracle


def prepared() -> tuple[Preconditioner, list[torch.Tensor | None], Any]:
    torch.manual_seed(0)
    model = SwinTiny()
    optimizer = Shampoo(model.parameters(), lr=1e-3, method="eigen", storage="paper")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    plan = optimizer._plan
    assert plan is not None
    (own,) = plan.preconditioners.values()
    by_index = {place.index: p for p, place in plan.places.items()}
    return own, [by_index[i].grad for i in range(len(by_index))], optimizer.config


def batched(own: Preconditioner, grads: Any, config: Any, warm_up: int, runs: int) -> float:
    """Seconds of an update, once the eigenvectors have settled."""
    due = {i: Due(config) for i in range(len(own.stacks.members))}
    guard = NonfiniteGuard(torch.device("cpu"), config)
    sizes, statistics_of = [grad.numel() for grad in grads], GradientStatistics()
    found = []
    for _ in range(warm_up + runs):
        fresh = [torch.randn_like(grad) for grad in grads]
        measured = guard.measure(fresh, sizes, [], {torch.float32})
        start = time.perf_counter()
        own.update(measured, Source(due, statistics_of.outer_products(own.stacks, measured, due)))
        found.append(time.perf_counter() - start)
        own.progress.settle()
    return statistics.median(found[warm_up:])


def one_by_one(own: Preconditioner) -> float:
    """Seconds of the same by the literal loop."""
    orders = Counter[int]()
    for group in own.stacks.groups:
        for factors in (group.left, group.right):
            orders[factors.order] += factors.rows
    total = 0.0
    for order, count in orders.items():
        factor = oracle.Factor(order, oracle.Options(method="eigen", bits=4), torch.float32)
        times = []
        for _ in range(2):
            G = torch.randn(order, order)
            start = time.perf_counter()
            factor.update(G @ G.mT)
            times.append(time.perf_counter() - start)
        total += count * times[-1]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    own, grads, config = prepared()
    together = batched(own, grads, config, warm_up=4, runs=arguments.runs)
    alone = one_by_one(own)
    report = {
        "torch": torch.__version__,
        "kronbit": kronbit.__version__,
        "threads": torch.get_num_threads(),
        "batched_s": together,
        "one_by_one_s": alone,
        "ratio": alone / together,
    }
    print(json.dumps(report, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
