r"""Measure how far each storage of the preconditioners rotates the update, against float64.

Usage::

    python benchmarks/accuracy/update_angle.py --output result.json [--cifar FOLDER] \
        [--plot angles.png]

The script records gradients of a real training run and replays them with every method, bit width
and storage. It trains a small transformer on the text of Python's documentation and, with
``--cifar``, a convolutional network on CIFAR-100 in its public layout. The exact preconditioned
gradient is L^(-1/4) G R^(-1/4) in float64. For every layer, the report has

- the bits of statistic and root per element of a matrix,
- the angle between the preconditioned gradient and the exact one,
- their relative error after both are scaled to norm 1, and
- the relative error of the roots.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kronbit
from kronbit import Shampoo
from kronbit.lab.data.pictures import read_cifar

BETA, DAMPING = 0.95, 1e-6
PROBES = 3
SCHEMES: dict[str, dict[str, Any]] = {
    "32 bits, 10 Newton steps": {"bits": 32},
    "32 bits, 30 Newton steps": {"bits": 32, "newton_steps": 30},
    "naive 4": {"bits": 4, "method": "naive", "storage": "paper"},
    "naive 4 compact": {"bits": 4, "method": "naive", "storage": "compact"},
    "eigen 4 (paper)": {"bits": 4, "method": "eigen", "storage": "paper"},
    "eigen 4 compact": {"bits": 4, "method": "eigen", "storage": "compact"},
    "eigen 8": {"bits": 8, "method": "eigen", "storage": "paper"},
    "eigen 8 compact": {"bits": 8, "method": "eigen", "storage": "compact"},
    "cholesky 3 compact": {"bits": 3, "method": "cholesky", "storage": "compact"},
    "cholesky 4": {"bits": 4, "method": "cholesky", "storage": "paper"},
    "cholesky 4 compact": {"bits": 4, "method": "cholesky", "storage": "compact"},
    "cholesky 6+4 compact": {
        "bits": 6,
        "root_bits": 4,
        "method": "cholesky",
        "storage": "compact",
    },
    "cholesky 6 compact": {"bits": 6, "method": "cholesky", "storage": "compact"},
    "cholesky 8+4 compact": {
        "bits": 8,
        "root_bits": 4,
        "method": "cholesky",
        "storage": "compact",
    },
    "cholesky 8 compact": {"bits": 8, "method": "cholesky", "storage": "compact"},
}


class Convolutional(nn.Module):
    """Three convolutions and three linear layers."""

    watched = ("c2", "c3", "f2", "f3")

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, padding=1)
        self.c3 = nn.Conv2d(128, 192, 3, padding=1)
        self.f1, self.f2, self.f3 = nn.Linear(3072, 768), nn.Linear(768, 768), nn.Linear(768, 100)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in (self.c1, self.c2, self.c3):
            x = functional.max_pool2d(convolution(x).relu(), 2)
        return self.f3(self.f2(self.f1(x.flatten(1)).relu()).relu())


class Text(nn.Module):
    """A causal transformer on bytes."""

    watched = ("qkv", "out", "up", "down")
    width, heads, length = 256, 4, 128

    def __init__(self) -> None:
        super().__init__()
        w = self.width
        self.symbols, self.places = nn.Embedding(256, w), nn.Embedding(self.length, w)
        self.norms = nn.ModuleList(nn.LayerNorm(w) for _ in range(3))
        self.qkv, self.out = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)
        self.head = nn.Linear(w, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.symbols(x) + self.places.weight
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](h)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        h = h + self.down(functional.gelu(self.up(self.norms[1](h))))
        return self.head(self.norms[2](h)).flatten(0, 1)


def images(folder: Path, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches of the training set of CIFAR-100."""
    x, y = (array.to(device) for array in read_cifar(folder / "train"))
    mean = torch.tensor([0.5071, 0.4865, 0.4409], device=device).view(1, 3, 1, 1)
    deviation = torch.tensor([0.2673, 0.2564, 0.2762], device=device).view(1, 3, 1, 1)
    while True:
        some = torch.randint(len(x), (128,), device=device)
        yield (x[some].float() / 255 - mean) / deviation, y[some]


def texts(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of bytes, each with the byte that follows it."""
    from pydoc_data import topics

    data = torch.tensor(list("\n".join(topics.topics.values()).encode()), device=device)
    window = torch.arange(Text.length + 1, device=device)
    while True:
        starts = torch.randint(len(data) - Text.length - 1, (32, 1), device=device)
        some = data[starts + window]
        yield some[:, :-1], some[:, 1:].flatten()


def record(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], updates: int, every: int
) -> dict[str, list[Tensor]]:
    """Train with AdamW and return every n-th gradient of the watched layers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    recorded: dict[str, list[Tensor]] = {name: [] for name in model.watched}
    for t in range(1, updates * every + 1):
        x, y = next(batches)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if t % every == 0:
            for name, grads in recorded.items():
                grads.append(getattr(model, name).weight.grad.flatten(1).clone())
        optimizer.step()
    print(f"{type(model).__name__}: loss {loss.item():.3f} after {t} steps", flush=True)
    return recorded


def exact_roots(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return L^(-1/4) and R^(-1/4) in float64."""
    roots = []
    for side in (False, True):
        A: Tensor | None = None
        for grad in grads:
            G = grad.double().mT if side else grad.double()
            A = DAMPING * torch.eye(len(G)).to(G) if A is None else A
            A = BETA * A + (1 - BETA) * G @ G.mT
        assert A is not None
        lam, V = torch.linalg.eigh(A)
        lam = lam.clamp(min=0)
        roots.append((V * (lam + DAMPING * lam.max()) ** -0.25) @ V.mT)
    return roots[0], roots[1]


def degrees(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten().double(), b.flatten().double()
    return math.degrees(math.acos(min(1.0, float(a @ b / (a.norm() * b.norm())))))


def replay(grads: list[Tensor], options: dict[str, Any], L: Tensor, R: Tensor) -> dict[str, float]:
    """Replay the gradients of a layer and return the errors of one scheme."""
    p = nn.Parameter(torch.zeros_like(grads[0]))
    settings = {"update_every": 1, "refresh_every": len(grads), "beta": BETA, "damping": DAMPING}
    optimizer = Shampoo([p], base="sgd", lr=0.0, max_order=1200, **settings, **options)
    start = time.perf_counter()
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    spent = time.perf_counter() - start
    optimizer.param_groups[0]["update_every"] = 10**9
    angles, errors = [], []
    for grad in grads[-PROBES:]:
        p.grad = grad.clone()
        optimizer.step()
        update, exact = p.grad.double(), L @ grad.double() @ R
        angles.append(degrees(update, exact))
        errors.append(float((update / update.norm() - exact / exact.norm()).norm()))
    (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
    (group,) = preconditioner.stacks.groups
    memory = optimizer.memory()
    state = memory["statistics"] + memory["roots"]
    result = {
        "bits_per_element": 8 * state / sum(side**2 for side in group.shape),
        "state_bytes": state,
        "angle_degrees": sum(angles) / PROBES,
        "relative_error": sum(errors) / PROBES,
        "seconds": spent,
    }
    for name, factors, exact in (("left", group.left, L), ("right", group.right, R)):
        root = factors.roots(slice(0, 1))[0].double()
        result[f"{name}_root_error"] = float((root - exact).norm() / exact.norm())
        result[f"{name}_root_angle_degrees"] = degrees(root, exact)
    return result


def plot(report: dict[str, Any], target: Path) -> None:
    """Plot the error against memory, averaged over the layers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"32": "#8a8f98", "naive": "#9aa7b5", "eigen": "#3b6ea8", "cholesky": "#e08a3c"}
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for name in SCHEMES:
        rows = [
            layer["schemes"][name]
            for layer in report["layers"].values()
            if name in layer["schemes"]
        ]
        if not rows:
            continue
        x, y = (
            sum(row[key] for row in rows) / len(rows)
            for key in ("bits_per_element", "angle_degrees")
        )
        if y < 0.1:  # below the axis
            continue
        method, compact = name.split()[0], "compact" in name
        marker = "o" if compact else "s"
        axes.scatter(x, y, s=45, color=colours[method], marker=marker, zorder=3)
        at_right = method == "cholesky" and compact
        axes.annotate(
            name.replace(" compact", ""),
            (x, y),
            xytext=(7, -3) if at_right else (0, -13 if method == "cholesky" else 7),
            textcoords="offset points",
            ha="left" if at_right else "center",
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([3, 4, 6, 8, 12, 16, 32, 64], ["3", "4", "6", "8", "12", "16", "32", "64"])
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xlim(2.8, 100)
    axes.minorticks_off()
    axes.set_xlabel("bits per element, statistic and root (round marks: compact storage)")
    axes.set_ylabel("angle to the exact update, degrees")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--cifar", type=Path, help="the folder with CIFAR-100's file 'train'")
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    arguments = parser.parse_args()
    device = arguments.device
    torch.manual_seed(0)
    sources: list[tuple[Callable[[], nn.Module], Iterator[tuple[Tensor, Tensor]]]] = [
        (Text, texts(device))
    ]
    if arguments.cifar is not None:
        sources.append((Convolutional, images(arguments.cifar, device)))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "kronbit": kronbit.__version__},
        "updates": arguments.updates,
        "every": arguments.every,
        "beta": BETA,
        "damping": DAMPING,
        "layers": {},
    }
    for make, batches in sources:
        recorded = record(make().to(device), batches, arguments.updates, arguments.every)
        for name, grads in recorded.items():
            L, R = exact_roots(grads)
            plain = [degrees(grad, L @ grad.double() @ R) for grad in grads[-PROBES:]]
            layer = f"{make.__name__.lower()}.{name}"
            shape = tuple(grads[0].shape)
            entry: dict[str, Any] = {"shape": shape, "gradient_angle": sum(plain) / PROBES}
            report["layers"][layer] = entry | {"schemes": {}}
            print(
                f"{layer} {shape}: plain gradient {entry['gradient_angle']:.1f} degrees from exact"
            )
            for scheme in arguments.schemes:
                figures = replay(grads, SCHEMES[scheme], L, R)
                report["layers"][layer]["schemes"][scheme] = figures
                print(
                    f"  {scheme:26} {figures['bits_per_element']:6.2f} bits "
                    f"{figures['angle_degrees']:6.2f} degrees, roots "
                    f"{figures['left_root_error']:.3f} {figures['right_root_error']:.3f}",
                    flush=True,
                )
                arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        plot(report, arguments.plot)


if __name__ == "__main__":
    main()
