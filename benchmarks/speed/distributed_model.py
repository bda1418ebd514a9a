"""A model on paper: what ranks would hold, send and compute for large language models.

Usage::

    python benchmarks/speed/distributed_model.py [--measured result_of_step_time.json]

Nothing is run. State, blocks and owners are those that kronbit would make; seconds are those of
LLaMA-350M on one H200 (``step_time.py``), scaled by what they depend on: the sum of n³ for updates
and refreshes, the sum of m n (m + n) over blocks for products. Gradients are bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kronbit.blocks.blocking import Blocking, route
from kronbit.config import Config
from kronbit.distributed.assignment import assign
from kronbit.distributed.owners import cost
from kronbit.reporting.memory import state_bytes

# Bytes per second and GPU, each way: 400 Gbit/s between machines, NVLink inside of one.
BETWEEN, INSIDE = 50e9, 450e9
NODE = 8  # GPUs of a machine, the shards of HSDP
BF16 = 2


class Sizes(NamedTuple):
    hidden: int
    inner: int
    layers: int
    keys: int
    vocabulary: int = 32000

    def shapes(self) -> Iterator[tuple[int, int]]:
        yield from [(self.vocabulary, self.hidden)] * 2
        for _ in range(self.layers):
            yield from [(self.hidden, self.hidden)] * 2 + [(self.keys, self.hidden)] * 2
            yield from [(self.inner, self.hidden)] * 2 + [(self.hidden, self.inner)]


# Of benchmarks/speed/models.py, and of Llama 2.
MEASURED = Sizes(1024, 2736, 24, 1024)
MODELS = {
    "LLaMA2-7B": Sizes(4096, 11008, 32, 4096),
    "LLaMA2-70B": Sizes(8192, 28672, 80, 1024),
}


class Work(NamedTuple):
    """Of one parameter."""

    cubes: int
    products: int
    statistics: int
    roots: int
    elements: int


def work(shape: tuple[int, int], config: Config) -> Work:
    way = route(shape, config)
    assert isinstance(way, Blocking)
    held = state_bytes(way, config)
    products = sum(
        len(grid) * grid.shape[0] * grid.shape[1] * sum(grid.shape) for grid in way.grids
    )
    return Work(cost(way), products, held["statistics"], held["roots"], shape[0] * shape[1])


def total(works: list[Work]) -> Work:
    return Work(*map(sum, zip(*works, strict=True)))


def most_of(works: list[Work], owners: int) -> Work:
    """What the ranks with most have, if each parameter has one owner."""
    shares: list[list[Work]] = [[] for _ in range(owners)]
    for one, rank in zip(works, assign([one.cubes for one in works], owners), strict=True):
        shares[rank].append(one)
    return Work(*map(max, zip(*(total(share) for share in shares if share), strict=True)))


def sent(count: float, ranks: int, inside: bool) -> str:
    """Gigabytes, and seconds, of what goes to or comes from all other ranks."""
    count *= 1 - 1 / ranks
    seconds = count / (INSIDE if inside else BETWEEN)
    return f"{count / 1e9:.2f} ({seconds:.3f})" if count else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).parents[2] / "results" / "speed" / "step_time_cholesky_h200.json"
    parser.add_argument("--measured", type=Path, default=default)
    arguments = parser.parse_args()
    found = json.loads(arguments.measured.read_text())["models"]["llama-350m"]["optimizers"]
    own = found["cholesky 4-bit compact"]
    small = total([work(shape, Config()) for shape in MEASURED.shapes()])
    update = 1e-3 * own["update_ms"] / small.cubes
    refresh = 1e-3 * (own["refresh_ms"] - own["update_ms"]) / small.cubes
    product = 1e-3 * own["above_adamw_ms"] / small.products
    print(f"s per n³: update {update:.3g}, refresh {refresh:.3g}; per m n (m + n): {product:.3g}\n")
    header = "model|GPUs|way|state, GB|every step, GB (s)|update, GB (s)|refresh, GB (s)|"
    header += "update, s|refresh, s|products, s"
    print(f"| {header.replace('|', ' | ')} |\n" + "|---" * 10 + "|")
    for name, sizes in MODELS.items():
        works = [work(shape, Config()) for shape in sizes.shapes()]
        everything = total(works)
        for gpus in (8, 64, 1024):
            for way in ("DDP", "shard_state", "FSDP2", *(["HSDP"] if gpus > NODE else [])):
                owners = {"DDP": 1, "HSDP": NODE}.get(way, gpus)
                copies = gpus // owners
                most = most_of(works, owners)
                # Local rows go to owners, and what these own comes back.
                rows = BF16 * (everything.elements / owners + most.elements)
                step = {"DDP": 0.0, "shard_state": BF16 * everything.elements}.get(way, rows)
                cells = [
                    f"{(most.statistics + most.roots) / 1e9:.2f}",
                    sent(step, owners, inside=owners <= NODE),
                    sent(most.statistics, copies, inside=gpus <= NODE),
                    sent(most.roots, copies, inside=gpus <= NODE),
                    f"{update * most.cubes / copies:.2f}",
                    f"{refresh * most.cubes / copies:.2f}",
                    f"{product * most.products:.4f}",
                ]
                print(f"| {name} | {gpus} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
