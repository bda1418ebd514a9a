"""Measure by how many degrees rounding in products rotates Ĝ = L̂ G R̂.

Usage::

    python benchmarks/accuracy/product_angles.py

Rounding is emulated in float64, on the CPU. L and R have power-law spectra. G is random with these
covariances, plus a share of white noise, and is rounded to bf16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ORDER = 768
ROUNDED = {"float16": torch.float16, "R̂ in bf16": torch.bfloat16}


def angle(a: Tensor, b: Tensor) -> float:
    chord = float((a / a.norm() - b / b.norm()).norm())
    return math.degrees(2 * math.asin(min(1.0, chord / 2)))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.float().to(dtype).double()


def scale_down(root: Tensor) -> Tensor:
    """Divide by the power of two above the largest element, as kernels do."""
    return root / 2.0 ** math.ceil(math.log2(float(root.max())))


def power(U: Tensor, eigenvalues: Tensor, exponent: float) -> Tensor:
    return (U * eigenvalues**exponent) @ U.mT


def random_basis(rotation: float) -> Tensor:
    """Return a random orthonormal basis, which is close to the axes if rotation is small."""
    noise = rotation * torch.randn(ORDER, ORDER, dtype=torch.float64)
    return torch.linalg.qr(noise if rotation == 1 else noise + torch.eye(ORDER).double())[0]


def main() -> None:
    torch.manual_seed(0)
    angles_of: dict[tuple[float, str], list[float]] = {}
    for rotation in (1.0, 0.02):
        for exponent in (0.5, 1, 2, 4, 8):
            eigenvalues = torch.arange(1, ORDER + 1).double() ** -exponent
            U, V = random_basis(rotation), random_basis(rotation)
            L, R = (power(basis, eigenvalues + 1e-6, -1 / 4) for basis in (U, V))
            Z = torch.randn(ORDER, ORDER, dtype=torch.float64)
            signal = power(U, eigenvalues, 1 / 2) @ Z @ power(V, eigenvalues, 1 / 2)
            for noise in (0.0, 0.01, 0.05):
                white = torch.randn(ORDER, ORDER, dtype=torch.float64)
                G = rounded(signal + noise * signal.norm() / ORDER * white, torch.bfloat16)
                exact = L @ G @ R
                left = rounded(scale_down(L), torch.float16)
                for name, dtype in ROUNDED.items():
                    Y = G @ rounded(scale_down(R), dtype)
                    Y = rounded(128 * Y / Y.norm(), torch.float16)
                    angles_of.setdefault((noise, name), []).append(angle(left @ Y, exact))
    for (noise, name), angles in angles_of.items():
        print(f"{noise:5.0%} noise, {name:12}: up to {max(angles):.3f} degrees")


if __name__ == "__main__":
    main()
