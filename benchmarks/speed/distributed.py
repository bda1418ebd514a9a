r"""Measure the traffic and the work of each rank, with gloo on one machine.

Usage::

    python benchmarks/speed/distributed.py --output result.json [--ranks 1 2 4] \
        [--layers 8] [--width 512]

The model is a sequence of linear layers with random gradients, on CPUs. There are four layouts:
replicas (as under DistributedDataParallel), replicas with ``shard_state=True``, parameters sharded
by rows (FSDP2), and FSDP2 with ``blocks="local"``. Ranks share the cores of the machine. Updates
and refreshes are therefore measured in processor time (``time.process_time``) with one thread per
rank, and compared with a single process that does all of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import kronbit
from kronbit import Shampoo
from kronbit.step.preconditioner import Preconditioner

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.ranks import run_on_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shard_state": {"shard_state": True},
    "fsdp2": {},
    "fsdp2, blocks='local'": {"blocks": "local"},
}
CYCLES, INTERVAL = 3, 4  # number of refreshes, and their interval; updates come twice as often


def traffic(optimizer: Shampoo) -> dict[str, int]:
    figures = optimizer.diagnostics()["ranks"]
    return {name: figures.get(name, 0) for name in ("received_bytes", "gradient_bytes")}


def measure(rank: int, layout: str, layers: int, width: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if layout.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    group = {} if layout.startswith("fsdp2") else {"process_group": dist.group.WORLD}
    schedule = {"update_every": INTERVAL // 2, "refresh_every": INTERVAL}
    optimizer = Shampoo(model.parameters(), lr=1e-3, **LAYOUTS[layout], **group, **schedule)
    spent: dict[str, list[float]] = {"_update_assigned": [], "_refresh_assigned": []}
    for name, times in spent.items():
        plain = getattr(Preconditioner, name)

        def timed(*args: Any, plain: Any = plain, times: list[float] = times) -> None:
            start = time.process_time()
            plain(*args)
            times.append(time.process_time() - start)

        setattr(Preconditioner, name, timed)
    by_step: list[dict[str, int]] = []
    before = traffic(optimizer)
    for t in range(1, CYCLES * INTERVAL + 1):
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = grad
        optimizer.step()
        after = traffic(optimizer)
        by_step.append({name: after[name] - before[name] for name in after})
        before = after
    last = by_step[-INTERVAL:]
    memory = optimizer.memory()
    return {
        "update_s": statistics.median(spent["_update_assigned"][1:] or [0.0]),
        "refresh_s": statistics.median(spent["_refresh_assigned"][1:] or [0.0]),
        "bytes_of_gradients_per_step": last[0]["gradient_bytes"],
        "bytes_received_ordinary": last[0]["received_bytes"],
        "bytes_received_update": last[1]["received_bytes"],
        "bytes_received_update_and_refresh": last[3]["received_bytes"],
        "second_order_state_bytes": memory["statistics"] + memory["roots"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {"torch": torch.__version__, "kronbit": kronbit.__version__},
        "layers": arguments.layers,
        "width": arguments.width,
        "ways": {},
    }
    for layout in LAYOUTS:
        single = None
        for ranks in arguments.ranks:
            by_rank = run_on_ranks(ranks, measure, layout, arguments.layers, arguments.width)
            largest = {name: max(figures[name] for figures in by_rank) for name in by_rank[0]}
            single = single or largest
            ratios = [
                largest[name] / single[name] if single[name] else None
                for name in ("update_s", "refresh_s")
            ]
            report["ways"].setdefault(layout, {})[ranks] = {
                "by_rank": by_rank,
                "slowest_over_one_process": dict(zip(("update", "refresh"), ratios, strict=True)),
            }
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
            text = " ".join(f"{name} {value:,.4g}" for name, value in largest.items())
            print(f"{layout}, {ranks} ranks: {text} ratios {ratios}", flush=True)


if __name__ == "__main__":
    main()
