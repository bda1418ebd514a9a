"""Compare an update of all blocks in batches with a loop over matrices, on the CPU.

Usage::

    python benchmarks/speed/batching.py [--output result.json]

Shapes are those of Swin-Tiny, at 4 bits, with new gradients at every update. The loop is the oracle
of the tests (``tests/support/oracle.py``) in float32. One matrix of each order is timed, and its
time is multiplied by the number of these matrices. Both times come from one run, so the load of the
machine hardly affects their ratio.
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
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import oracle


def prepare() -> tuple[Preconditioner, list[torch.Tensor | None], Any]:
    torch.manual_seed(0)
    model = SwinTiny()
    optimizer = Shampoo(model.parameters(), lr=1e-3, method="eigen", storage="paper")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    plan = optimizer._keeper.plan
    assert plan is not None
    (preconditioner,) = plan.preconditioners.values()
    by_index = {index: p for p, (_, index) in plan.locations.items()}
    return preconditioner, [by_index[i].grad for i in range(len(by_index))], optimizer.config


def batched(
    preconditioner: Preconditioner, grads: Any, config: Any, warm_up: int, runs: int
) -> float:
    """Return the seconds of an update after the eigenvectors have settled."""
    due = {i: Due(config) for i in range(len(preconditioner.stacks.members))}
    guard = NonfiniteGuard(torch.device("cpu"), config)
    sizes, statistics_of = [grad.numel() for grad in grads], GradientStatistics()
    times = []
    for _ in range(warm_up + runs):
        new = [torch.randn_like(grad) for grad in grads]
        measured = guard.measure(new, sizes, [], {torch.float32})
        start = time.perf_counter()
        M_of = statistics_of.outer_products(preconditioner.stacks, measured, due)
        preconditioner.update(measured, due, M_of)
        times.append(time.perf_counter() - start)
        preconditioner.progress.settle()
    return statistics.median(times[warm_up:])


def one_by_one(preconditioner: Preconditioner) -> float:
    """Return the seconds of the same update by a loop over matrices."""
    orders = Counter[int]()
    for group in preconditioner.stacks.groups:
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
    preconditioner, grads, config = prepare()
    together = batched(preconditioner, grads, config, warm_up=4, runs=arguments.runs)
    alone = one_by_one(preconditioner)
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
