"""Estimate the state, traffic and time of each rank for large language models.

Usage::

    python benchmarks/speed/distributed_model.py [--measured result_of_step_time.json]

Nothing is trained. State, blocks and owners are those that kronbit would use. Seconds are measured
with LLaMA-350M on one H200 (``step_time.py``) and scaled: updates and refreshes by the sum of n³
over factors, products by the sum of m n (m + n) over blocks. Gradients are bf16.
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

# Bytes per second and GPU in each direction: 400 Gbit/s between machines, NVLink inside one.
BETWEEN, INSIDE = 50e9, 450e9
NODE = 8  # GPUs per machine; under HSDP, also the number of shards
BF16 = 2


class Sizes(NamedTuple):
    """Sizes of a LLaMA network.

    Attributes:
        hidden: Width of the hidden states.
        inner: Width inside the MLP.
        layers: Number of layers.
        keys: Width of all keys of a token, and of all values.
        vocabulary: Number of tokens.
    """

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


# The measured model is that of benchmarks/speed/models.py; the others are Llama 2.
MEASURED = Sizes(1024, 2736, 24, 1024)
MODELS = {
    "LLaMA2-7B": Sizes(4096, 11008, 32, 4096),
    "LLaMA2-70B": Sizes(8192, 28672, 80, 1024),
}


class Work(NamedTuple):
    """Operations and bytes of one parameter, or of several.

    Attributes:
        cubes: Sum of n³ over factors, for updates and refreshes.
        products: Sum of m n (m + n) over blocks, for products.
        statistics: Bytes of statistics.
        roots: Bytes of roots.
        elements: Number of elements.
    """

    cubes: int
    products: int
    statistics: int
    roots: int
    elements: int


def work(shape: tuple[int, int], config: Config) -> Work:
    blocking = route(shape, config)
    assert isinstance(blocking, Blocking)
    memory = state_bytes(blocking, config)
    products = sum(
        len(grid) * grid.shape[0] * grid.shape[1] * sum(grid.shape) for grid in blocking.grids
    )
    return Work(
        cost(blocking), products, memory["statistics"], memory["roots"], shape[0] * shape[1]
    )


def total(works: list[Work]) -> Work:
    return Work(*map(sum, zip(*works, strict=True)))


def largest_share(works: list[Work], owners: int) -> Work:
    """Return the largest share of any rank in each kind of work, with one owner per parameter."""
    shares: list[list[Work]] = [[] for _ in range(owners)]
    for part, rank in zip(works, assign([part.cubes for part in works], owners), strict=True):
        shares[rank].append(part)
    return Work(*map(max, zip(*(total(share) for share in shares if share), strict=True)))


def sent(size: float, ranks: int, inside: bool) -> str:
    """Return gigabytes and seconds of the traffic with all other ranks."""
    size *= 1 - 1 / ranks
    seconds = size / (INSIDE if inside else BETWEEN)
    return f"{size / 1e9:.2f} ({seconds:.3f})" if size else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).parents[2] / "results" / "speed" / "step_time_cholesky_h200.json"
    parser.add_argument("--measured", type=Path, default=default)
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text())["models"]["llama-350m"]["optimizers"]
    times = measured["cholesky 4-bit compact"]
    small = total([work(shape, Config()) for shape in MEASURED.shapes()])
    update = 1e-3 * times["update_ms"] / small.cubes
    refresh = 1e-3 * (times["refresh_ms"] - times["update_ms"]) / small.cubes
    product = 1e-3 * times["above_adamw_ms"] / small.products
    print(f"s per n³: update {update:.3g}, refresh {refresh:.3g}; per m n (m + n): {product:.3g}\n")
    header = "model|GPUs|layout|state, GB|every step, GB (s)|update, GB (s)|refresh, GB (s)|"
    header += "update, s|refresh, s|products, s"
    print(f"| {header.replace('|', ' | ')} |\n" + "|---" * 10 + "|")
    for name, sizes in MODELS.items():
        works = [work(shape, Config()) for shape in sizes.shapes()]
        everything = total(works)
        for gpus in (8, 64, 1024):
            for layout in ("DDP", "shard_state", "FSDP2", *(["HSDP"] if gpus > NODE else [])):
                owners = {"DDP": 1, "HSDP": NODE}.get(layout, gpus)
                copies = gpus // owners
                largest = largest_share(works, owners)
                # Local rows are sent to their owners, and results come back.
                rows = BF16 * (everything.elements / owners + largest.elements)
                step = {"DDP": 0.0, "shard_state": BF16 * everything.elements}.get(layout, rows)
                cells = [
                    f"{(largest.statistics + largest.roots) / 1e9:.2f}",
                    sent(step, owners, inside=owners <= NODE),
                    sent(largest.statistics, copies, inside=gpus <= NODE),
                    sent(largest.roots, copies, inside=gpus <= NODE),
                    f"{update * largest.cubes / copies:.2f}",
                    f"{refresh * largest.cubes / copies:.2f}",
                    f"{product * largest.products:.4f}",
                ]
                print(f"| {name} | {gpus} | {layout} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
