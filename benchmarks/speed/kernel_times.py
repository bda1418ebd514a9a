"""Compare the kernels with the measured ceilings of the GPU: GB/s of copies, TFLOP/s of products.

Usage::

    python benchmarks/speed/kernel_times.py --output result.json

Needs a CUDA device. Sizes are those of a batch at the paper's order 1200, and of smaller factors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import kronbit
from kronbit.kernels import quantization as quantiser
from kronbit.kernels.cholesky import Chain, inverse_factor_
from kronbit.linalg.orthogonal import cholesky_qr
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import multiply, operand
from kronbit.linalg.roots import inverse_root
from kronbit.quantization import Quantizer

SIZES = ((7, 1200), (16, 768), (32, 384))


def milliseconds(call: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median"))


def ceilings() -> dict[str, float]:
    x, y = (torch.empty(2**29, dtype=torch.uint8, device="cuda") for _ in range(2))
    A = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    B = torch.randn(4096, 4096, device="cuda")
    with full_precision():
        single = 2e-9 * 4096**3 / milliseconds(lambda: B @ B)
    return {
        "copy_gb_per_s": 2e-6 * x.numel() / milliseconds(lambda: y.copy_(x)),
        "bf16_tflop_per_s": 2e-9 * 8192**3 / milliseconds(lambda: A @ A),
        "float32_tflop_per_s": single,
    }


def orthonormal(k: int, n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, device="cuda"))[0].repeat(k, 1, 1)


def measure(k: int, n: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and the rate in the unit of the matching ceiling, by name."""
    V = orthonormal(k, n)
    A = torch.randn(k, n, 2 * n, device="cuda")
    A = A @ A.mT / n
    figures: dict[str, dict[str, float]] = {}
    for bits in (4, 8):
        reference = Quantizer(bits)
        code_format = reference.code_format
        codes, scales, _ = quantiser.encode(V, False, code_format)
        moved = V.numel() * (4 + bits / 8 + 4 / 64)
        encoded = reference.encode(V)
        for name, call in {
            f"quantise {bits}-bit": lambda f=code_format: quantiser.encode(V, False, f),
            f"dequantise {bits}-bit": lambda c=codes, s=scales, f=code_format: quantiser.decode(
                c, s, None, f
            ),
            f"quantise {bits}-bit, torch": lambda r=reference: r.encode(V),
            f"dequantise {bits}-bit, torch": lambda r=reference, q=encoded: r.decode(q, n),
        }.items():
            spent = milliseconds(call)
            figures[name] = {"ms": spent, "gb_per_s": 1e-6 * moved / spent}
    v, a = operand(V, bound=1.0), operand(A)
    flops = 2e-9 * k * n**3
    S = torch.randn(k, n, 2 * n, device="cuda")
    S = S @ S.mT / n
    all_rows = torch.ones(k, dtype=torch.bool, device="cuda")
    chain = Chain(all_rows.device, graphs=True)
    with full_precision():
        for name, call, count in (
            ("product", lambda: multiply(a, v), flops),
            ("product, operands included", lambda: multiply(operand(A), operand(V)), flops),
            ("symmetric product", lambda: multiply(v, v.mT, symmetric=True), flops),
            ("product, torch float32", lambda: A @ V, flops),
            (
                "inverse Cholesky factor",
                lambda: inverse_factor_(S.clone(), 0.0, all_rows, chain),
                flops / 3,
            ),
            ("orthonormalise", lambda: cholesky_qr(V.clone(), chain), 5 * flops),
            ("inverse root, Schur-Newton", lambda: inverse_root(A, 4, 1e-6, 10), 40 * flops),
        ):
            spent = milliseconds(call)
            figures[name] = {"ms": spent, "tflop_per_s": count / spent}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {m.__name__: m.__version__ for m in (torch, triton, kronbit)},
        "ceilings": ceilings(),
        "sizes": {},
    }
    print(report["ceilings"])
    for k, n in SIZES:
        report["sizes"][f"{k} x {n}"] = figures = measure(k, n)
        for name, values in figures.items():
            print(
                f"{k:3} x {n:<5} {name:32} " + " ".join(f"{u} {v:.3g}" for u, v in values.items())
            )
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
