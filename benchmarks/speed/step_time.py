r"""Measure time and memory of an optimizer step on one GPU: fused AdamW, kronbit, and peers.

Usage::

    python benchmarks/speed/step_time.py --output result.json [--models gpt2-124m ...] \
        [--optimizers ...]

Needs a CUDA device and transformers; peers are measured if they can be imported. Data is random,
the backward pass is real, and gradients are set to None between steps. The schedule is shortened
(an update every 10 steps, a refresh every 20); "amortised" spreads the medians over the paper's T1
and T2. The overhead is relative to a training step of forward + backward + fused AdamW.

The speed of a machine changes within seconds, so every optimizer takes turns with a fused AdamW on
the same parameters. "above adamw" is the difference of the two; for AdamW itself, it is noise.

"floor" is a lower bound of an ordinary step: the time of its batched products in bf16 by torch.bmm,
plus the time in which the GPU moves the step's bytes at the measured bandwidth. Codes and scales of
the roots are read once. Gradients are read for the norm, read again, and written.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from models import CASES, Case
from torch import nn

import kronbit
from kronbit import CASPR, Shampoo
from kronbit.blocks.batches import refresh_cost
from kronbit.blocks.groups import Due
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import multiply, operand
from kronbit.linalg.roots import steps_of

SCHEDULE = {"update_every": 10, "refresh_every": 20}
# The first and the last step that count. Earlier steps compile kernels and let statistics see more
# than a few gradients.
SECOND_ORDER, FIRST_ORDER = (81, 160), (21, 80)
ADAMW_SETTLES = 5  # first steps of AdamW, which do not count
PAPER: dict[str, Any] = {"method": "eigen", "storage": "paper"}
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.05, "fused": True}


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's Muon for hidden matrices and fused AdamW for the rest, as one optimizer."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "emb" not in n]
    hidden = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in hidden]

    class MuonAndAdamW(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.parts = [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, **ADAMW)]
            super().__init__([*matrices, *rest], {})

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

    return MuonAndAdamW()


def distributed_shampoo(model: nn.Module) -> torch.optim.Optimizer:
    from distributed_shampoo import AdamGraftingConfig
    from distributed_shampoo import DistributedShampoo as Peer

    return Peer(
        model.parameters(),
        lr=1e-4,
        max_preconditioner_dim=1200,
        precondition_frequency=SCHEDULE["refresh_every"],
        grafting_config=AdamGraftingConfig(beta2=0.999, epsilon=1e-8),
    )


def heavyball_soap(model: nn.Module) -> torch.optim.Optimizer:
    import heavyball

    return heavyball.ForeachSOAP(model.parameters(), lr=1e-4)


def soap(model: nn.Module) -> torch.optim.Optimizer:
    from soap import SOAP

    return SOAP(model.parameters(), lr=1e-4, precondition_frequency=SCHEDULE["refresh_every"])


def shampoo(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: Shampoo(m.parameters(), **options, **ADAMW, **SCHEDULE)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), **ADAMW),
    "shampoo 4-bit": shampoo(bits=4, **PAPER),
    "shampoo 8-bit": shampoo(bits=8, **PAPER),
    "shampoo 32-bit": shampoo(bits=32),
    "eigen 4-bit compact": shampoo(bits=4, method="eigen", storage="compact"),
    "cholesky 4-bit compact": shampoo(bits=4, method="cholesky", storage="compact"),
    "cholesky 8-bit compact": shampoo(bits=8, method="cholesky", storage="compact"),
    "caspr 4-bit": lambda m: CASPR(m.parameters(), bits=4, **PAPER, **ADAMW, **SCHEDULE),
    "muon + adamw": muon,
    "meta distributed shampoo": distributed_shampoo,
    "heavyball soap": heavyball_soap,
    "soap": soap,
}


def kind_of(t: int) -> str:
    if t % SCHEDULE["refresh_every"] == 0:
        return "refresh"
    return "update" if t % SCHEDULE["update_every"] == 0 else "ordinary"


def prepare(case: Case) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return case.build().to(case.dtype)


def milliseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def as_graph(case: Case) -> float | None:
    """Return milliseconds of forward and backward as one graph, or None if capture fails."""
    model, batch = prepare(case), case.batch()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model.zero_grad()
                case.loss(model, batch).backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        model.zero_grad()
        with torch.cuda.graph(graph):
            case.loss(model, batch).backward()
        return statistics.median(milliseconds(graph.replay) for _ in range(20))
    except Exception as error:  # the passes of this model cannot be captured
        print(f"  not captured: {str(error).splitlines()[0]}")
        return None


def run(case: Case, make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Any]:
    """Return memory and times by kind of step, and the times of AdamW and of the passes."""
    model = prepare(case)
    optimizer, adamw = make(model), OPTIMIZERS["adamw"](model)
    adamw_steps: list[tuple[float, float, float]] = []
    times: dict[str, list[float]] = {"ordinary": [], "update": [], "refresh": []}
    above: dict[str, float] = dict.fromkeys(times, 0.0)
    warm_up = 0.0
    second_order = isinstance(optimizer, kronbit.Shampoo | kronbit.CASPR)
    settled, last = SECOND_ORDER if second_order else FIRST_ORDER

    def step(stepped: torch.optim.Optimizer) -> tuple[float, float, float]:
        """Return milliseconds of the passes and of the step, and the MiB that its peak adds."""
        batch = case.batch()  # a new batch cannot be memorised
        model.zero_grad()
        before = milliseconds(lambda: case.loss(model, batch).backward())
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        spent = milliseconds(stepped.step)
        return before, spent, (torch.cuda.max_memory_allocated() - rest) / 2**20

    for t in range(1, last + 1):
        if t >= settled - ADAMW_SETTLES:
            adamw_steps.append(step(adamw))
        _, spent, peak = step(optimizer)
        if t >= settled:
            times[kind_of(t)].append(spent)
            above[kind_of(t)] = max(above[kind_of(t)], peak)
        elif t <= 2 * SCHEDULE["refresh_every"]:
            warm_up += spent / 1e3
    model.zero_grad()
    del adamw
    result: dict[str, Any] = {
        f"{name}_ms": statistics.median(values) for name, values in times.items()
    }
    before, plain, _ = zip(*adamw_steps[ADAMW_SETTLES:], strict=True)
    result["forward_backward_ms"] = statistics.median(before)
    result["adamw_ms"] = statistics.median(plain)
    result["ordinary_p99_ms"] = sorted(times["ordinary"])[int(0.99 * len(times["ordinary"]))]
    result["peak_above_rest_mib"] = above
    result["rest_mib"] = torch.cuda.memory_allocated() / 2**20
    result["first_40_steps_s"] = warm_up
    if isinstance(optimizer, kronbit.Shampoo | kronbit.CASPR):
        result["memory"] = optimizer.memory()
        result["floor_ms"] = floor(optimizer)
        result |= roots(optimizer)
        counts = optimizer.diagnostics()
        result["diagnostics"] = {k: v for k, v in counts.items() if k != "groups"}
    return result


def bandwidth() -> float:
    """Return the bytes per second of a large copy, counting reads and writes."""
    x, y = (torch.empty(2**29, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = 1e-3 * triton.testing.do_bench(lambda: y.copy_(x), return_mode="median")
    return 2 * x.numel() / seconds


def floor(optimizer: kronbit.Shampoo | kronbit.CASPR) -> dict[str, float]:
    """Return lower bounds of an ordinary step: the time of its products and of its bytes."""
    (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
    products = bytes_moved = 0.0
    element = next(p for g in optimizer.param_groups for p in g["params"]).element_size()
    for group in preconditioner.stacks.groups:
        (m, n), k = group.shape, group.left.rows
        G, L, R = (
            torch.randn(k, *shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((m, n), (m, m), (n, n))
        )

        def multiply(G: Any = G, L: Any = L, R: Any = R) -> None:
            for by in preconditioner.stacks.rule:
                if by.left:
                    torch.bmm(L, G)
                if by.right:
                    torch.bmm(G, R)

        products += triton.testing.do_bench(multiply, warmup=5, rep=20, return_mode="median")
        roots = sum(
            tensor.nbytes
            for side in (group.left, group.right)
            for name, tensor in side.tensors.items()
            if name.startswith("root")
        )
        bytes_moved += roots + 3 * k * m * n * element
        del G, L, R, multiply
    moved = 1e3 * bytes_moved / bandwidth()
    return {"products": products, "bytes": moved, "total": products + moved}


def roots(optimizer: kronbit.Shampoo | kronbit.CASPR) -> dict[str, float]:
    """Return milliseconds of a refresh, without tests of product precision, and its floor.

    The floor of Cholesky refreshes is the time of as many operations in large products. The two
    are measured in turn because a GPU under load lowers its clock.
    """
    (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
    due = {i: Due(member.config) for i, member in enumerate(preconditioner.stacks.members)}
    x = operand(torch.randn(16, 1200, 1200, device="cuda"))
    out = torch.empty(16, 1200, 1200, device="cuda")
    sides = [side for group in preconditioner.stacks.groups for side in (group.left, group.right)]
    # Only half of a symmetric product is computed.
    operations = sum(side.rows * products_of_a_root(side.order) * side.order**3 for side in sides)
    count = operations / (16 * 2 * 1200**3)

    def large_products() -> None:
        for _ in range(math.ceil(count)):
            multiply(x, x, out=out)

    def refresh() -> None:
        preconditioner._refresh(preconditioner._cut_due(due, refresh_cost))

    refreshes, floors = [], []
    with torch.no_grad(), full_precision():
        for _ in range(9):
            refreshes.append(milliseconds(refresh))
            floors.append(milliseconds(large_products) * count / math.ceil(count))
    result = {"roots_ms": statistics.median(refreshes)}
    if all(side.format.method == "cholesky" for side in sides):
        result["roots_floor_ms"] = statistics.median(floors)
    return result


def products_of_a_root(order: int, damping: float = 1e-6) -> float:
    """Count the products: 5 per step, but 4 at the first and 2 at the last, and 1/3 for C Cᵀ."""
    return 1 / 3 + 5 * len(steps_of(order, 4, damping)) - 4


def amortised(result: dict[str, Any], case: Case) -> float:
    """Return milliseconds per step over T1 and T2 of the case."""
    T1, T2 = case.schedule
    cycle = math.lcm(T1, T2)
    refreshes = cycle // T2
    updates = cycle // T1 - refreshes
    ordinary = cycle - updates - refreshes
    total = ordinary * result["ordinary_ms"]
    total += updates * result["update_ms"] + refreshes * result["refresh_ms"]
    return float(total / cycle)


def line(name: str, result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"  {name:26} {result['skipped']}"
    text = (
        f"  {name:26} {result['ordinary_ms']:8.2f} {result['update_ms']:8.1f} "
        f"{result['refresh_ms']:8.1f} {result['amortised_ms']:8.2f} "
        f"{result['ordinary_p99_ms']:8.2f} {result['rest_mib']:8.0f} "
        f"{max(result['peak_above_rest_mib'].values()):8.0f}"
    )
    shares = " ".join(f"{k} {100 * v:.1f} %" for k, v in result["overhead"].items())
    text += (
        f"  above adamw ({result['adamw_ms']:.2f}) {result['above_adamw_ms']:.2f}, overhead "
        f"{shares} after {result['forward_backward_ms']:.1f}"
    )
    if "floor_ms" in result:
        text += f", floor {result['floor_ms']['total']:.2f}"
        text += f", roots alone {result['roots_ms']:.1f}"
    if result.get("roots_floor_ms"):
        text += f" (floor {result['roots_floor_ms']:.1f})"
    return text


def measure(name: str, chosen: list[str], report: dict[str, Any]) -> Iterator[None]:
    """Measure the optimizers on a model one by one, and add each to the report."""
    case = CASES[name]
    graph = as_graph(case)
    report |= {"forward_backward_as_graph_ms": graph, "optimizers": {}}
    print(f"{name}: forward + backward as a graph {graph}")
    header = ("ordinary", "update", "refresh", "amort.", "p99", "rest MiB", "+peak")
    print(f"  {'optimizer, ms':26} " + " ".join(f"{column:>8}" for column in header), flush=True)
    for optimizer in chosen:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            result = run(case, OPTIMIZERS[optimizer])
        except (ImportError, AttributeError) as error:
            result = {"skipped": f"not available: {error}"}
        else:
            result["amortised_ms"] = amortised(result, case)
            adamw = result["adamw_ms"]
            result["above_adamw_ms"] = result["ordinary_ms"] - adamw
            result["overhead"] = {
                mode: (result["amortised_ms"] - adamw) / (spent + adamw)
                for mode, spent in (("eager", result["forward_backward_ms"]), ("graph", graph))
                if spent is not None
            }
        report["optimizers"][optimizer] = result
        print(line(optimizer, result), flush=True)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            module.__name__: module.__version__ for module in (torch, triton, transformers, kronbit)
        },
        "bandwidth_gb_per_s": bandwidth() / 1e9,
        "measured_with": SCHEDULE,
        "models": {},
    }
    for name in arguments.models:
        for _ in measure(name, arguments.optimizers, report["models"].setdefault(name, {})):
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
