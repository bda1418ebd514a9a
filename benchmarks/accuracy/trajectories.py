"""Hash weights and state after 200 steps of every configuration, to compare two versions.

The script checks that a change of kronbit does not change results: run it before and after, and
compare the two files. It uses only the public interface, so any version can run it::

    PYTHONPATH=old/src python benchmarks/accuracy/trajectories.py --out old.json
    PYTHONPATH=new/src python benchmarks/accuracy/trajectories.py --out new.json --compare old.json

The script runs on a GPU with kernels if there is one. ``--device cpu`` runs it on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kronbit

STEPS = 200
INTERVALS: dict[str, Any] = {"update_every": 5, "refresh_every": 10, "first_refresh": 2}
METHODS = {3: ("eigen", "naive", "cholesky"), 4: ("eigen", "naive", "cholesky")}
METHODS |= {8: METHODS[4], 32: ("dense", "eigen", "cholesky")}


class Network(nn.Module):
    """A convolution, a norm, experts, and linear layers near the smallest quantised order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 66, 3)
        self.norm = nn.BatchNorm2d(66)
        self.linear = nn.Linear(66, 131)
        self.head = nn.Linear(131, 10)
        self.experts = nn.Parameter(torch.randn(3, 10, 9) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        h = self.head(self.linear(h).tanh())
        return torch.einsum("bi,eij->bej", h, self.experts).sum((1, 2))


def configurations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return algorithm and options of every configuration, by name."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for algorithm in ("Shampoo", "CASPR", "KFAC", "AdaBK"):
        for bits, methods in METHODS.items():
            for method in methods:
                for storage in ("paper", "compact") if bits < 32 else ("paper",):
                    options = {"bits": bits, "method": method, "storage": storage}
                    cases[f"{algorithm} {method} {bits} {storage}"] = algorithm, options
    for name, options in {
        "stagger": {"stagger": True, "first_refresh": None},
        "stagger early": {"stagger": True},
        "offload": {"offload_statistics": True},
        "even": {"split": "even", "max_order": 64},
        "greedy": {"max_order": 50, "workspace_mb": 0.2},
        "mixed bits": {"bits": 8, "root_bits": 4},
        "trace": {"trace_scaling": True, "exponent": -0.5},
        "newton": {"method": "eigen", "root": "schur_newton"},
        "keep": {"keep_gradients": True},
        "start": {"start": 0.0, "beta": 0.5},
        "no graphs": {"cuda_graph": False},
    }.items():
        cases[f"Shampoo {name}"] = "Shampoo", options
    cases["KFAC reduce"] = "KFAC", {"shared": "reduce"}
    return cases


def build(
    algorithm: str, options: dict[str, Any], device: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network().to(device=device, dtype=dtype)
    arguments = {**INTERVALS, **options}
    if algorithm in ("KFAC", "AdaBK"):
        arguments["model"] = model
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return model, getattr(kronbit, algorithm)(base, **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice = slice(None)) -> None:
    """Take ``STEPS`` steps. ``part`` is the slice of every batch that this rank gets."""
    p = next(model.parameters())
    for t in range(STEPS):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(6, 3, 6, 6, generator=generator)[part].to(p.device, p.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all leaves of nested dicts and lists with their paths."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from leaves(item, f"{path}/{key}")
    else:
        yield path, value


def digest(value: Any) -> str:
    """Return a hash of all paths, dtypes, shapes and bits."""
    bits = hashlib.sha256()
    for path, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            local = getattr(leaf, "_local_tensor", leaf).detach().cpu().contiguous()
            bits.update(f"{path} {local.dtype} {tuple(local.shape)}".encode())
            bits.update(local.flatten().view(torch.uint8).numpy().tobytes())
        else:
            bits.update(f"{path} {leaf!r}".encode())
    return bits.hexdigest()[:16]


def hashes(model: nn.Module, optimizer: Any) -> dict[str, str]:
    shards = optimizer.config.shard_state
    state = kronbit.consolidate_state_dict(optimizer) if shards else optimizer.state_dict()
    return {"weights": digest(model.state_dict()), "state": digest(state.get("state"))}


def in_one_process(device: str, algorithm: str, options: dict[str, Any], dtype: torch.dtype) -> Any:
    model, optimizer = build(algorithm, options, device, dtype)
    train(model, optimizer)
    return hashes(model, optimizer)


def ddp(rank: int, world: int, device: str, options: dict[str, Any]) -> Any:
    model, optimizer = build(options.pop("algorithm", "Shampoo"), options, device)
    train(DistributedDataParallel(model), optimizer, slice(rank, None, world))
    return hashes(model, optimizer)


def fsdp2(rank: int, world: int, device: str, options: dict[str, Any]) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 131), nn.Tanh(), nn.Linear(131, 66)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    optimizer = kronbit.Shampoo(base, **INTERVALS, **options)
    for t in range(STEPS):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(12, 70, generator=generator)[rank::world].to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return hashes(model, optimizer)


def _rank(
    rank: int,
    world: int,
    port: int,
    backend: str,
    function: Callable[..., Any],
    args: Any,
    out: Any,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}"
    )
    out.put((rank, function(rank, world, *args)))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world: int, backend: str, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call a function on every rank; return the hashes of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, world, port, backend, function, args, out))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    answers = dict(out.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return {f"rank {rank}": answers[rank] for rank in sorted(answers)}


def record(device: str, only: str) -> Iterator[tuple[str, Any]]:
    for name, (algorithm, options) in configurations().items():
        if only in name:
            yield name, in_one_process(device, algorithm, options, torch.float32)
    for name in ("Shampoo cholesky 4 compact", "Shampoo eigen 4 paper"):
        if only in name:
            algorithm, options = configurations()[name]
            yield f"{name} bf16", in_one_process(device, algorithm, options, torch.bfloat16)
    backend, worlds = ("gloo", (2, 3)) if device == "cpu" else ("nccl", (1,))
    for world in worlds:
        for name, function, options in (
            ("ddp", ddp, {}),
            ("ddp kfac", ddp, {"algorithm": "KFAC"}),
            ("ddp shard_state", ddp, {"shard_state": True}),
            ("fsdp2", fsdp2, {}),
            ("fsdp2 local", fsdp2, {"blocks": "local"}),
        ):
            if only in name and not (world == 1 and "shard" in name):
                yield f"{name} {world} ranks", on_ranks(world, backend, function, device, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="file written by an earlier version")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="record only names that contain this text")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(arguments.device != "cpu")
    torch.set_num_threads(1)
    before = json.loads(arguments.compare.read_text()) if arguments.compare else {}
    after: dict[str, Any] = {}
    for name, values in record(arguments.device, arguments.only):
        after[name] = values
        if name in before and before[name] != values:
            print(f"differs: {name}", flush=True)
        arguments.out.write_text(json.dumps(after, indent=1) + "\n")
    differing = [name for name in after if name in before and before[name] != after[name]]
    compared = len(after.keys() & before.keys())
    print(f"{len(after)} configurations; {compared} compared, {len(differing)} differ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
