"""By how many degrees rounding turns Ĝ = L̂ G R̂, emulated in float64 on the CPU.

Usage::

    python benchmarks/accuracy/product_angles.py

L and R have power-law spectra; G has their covariances, a share of white noise, and is in bf16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ORDER = 768
WAYS = {"float16": torch.float16, "R̂ in bf16": torch.bfloat16}


def angle(a: Tensor, b: Tensor) -> float:
    chord = float((a / a.norm() - b / b.norm()).norm())
    return math.degrees(2 * math.asin(min(1.0, chord / 2)))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.float().to(dtype).double()


def divided(root: Tensor) -> Tensor:
    """By the power of two above its largest element, as kernels do."""
    return root / 2.0 ** math.ceil(math.log2(float(root.max())))


def power(U: Tensor, eigenvalues: Tensor, exponent: float) -> Tensor:
    return (U * eigenvalues**exponent) @ U.mT


def basis(turned: float) -> Tensor:
    """A random one (1), or one that is near the axes."""
    noise = turned * torch.randn(ORDER, ORDER, dtype=torch.float64)
    return torch.linalg.qr(noise if turned == 1 else noise + torch.eye(ORDER).double())[0]


def main() -> None:
    torch.manual_seed(0)
    found: dict[tuple[float, str], list[float]] = {}
    for turned in (1.0, 0.02):
        for exponent in (0.5, 1, 2, 4, 8):
            eigenvalues = torch.arange(1, ORDER + 1).double() ** -exponent
            U, V = basis(turned), basis(turned)
            L, R = (power(basis, eigenvalues + 1e-6, -1 / 4) for basis in (U, V))
            Z = torch.randn(ORDER, ORDER, dtype=torch.float64)
            signal = power(U, eigenvalues, 1 / 2) @ Z @ power(V, eigenvalues, 1 / 2)
            for noise in (0.0, 0.01, 0.05):
                white = torch.randn(ORDER, ORDER, dtype=torch.float64)
                G = rounded(signal + noise * signal.norm() / ORDER * white, torch.bfloat16)
                exact = L @ G @ R
                left = rounded(divided(L), torch.float16)
                for name, dtype in WAYS.items():
                    Y = G @ rounded(divided(R), dtype)
                    Y = rounded(128 * Y / Y.norm(), torch.float16)
                    found.setdefault((noise, name), []).append(angle(left @ Y, exact))
    for (noise, name), angles in found.items():
        print(f"{noise:5.0%} noise, {name:12}: up to {max(angles):.3f} degrees")


if __name__ == "__main__":
    main()
