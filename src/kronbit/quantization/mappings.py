"""Quantisation mappings R: codebooks of the values that codes stand for, on [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAPPINGS = ("linear2", "dt", "linear")


def _linear(bits: int) -> list[float]:
    """Return evenly spaced x_j = -1 + 2j / (2^b - 1); the code below the middle is exactly 0."""
    x = [-1 + 2 * j / (2**bits - 1) for j in range(2**bits)]
    x[2 ** (bits - 1) - 1] = 0.0
    return x


def _dynamic_tree(bits: int) -> list[float]:
    """Return the dynamic tree: {0, 1} and ±q_k 10^-E for every split b = 2 + E + F."""
    values = [0.0, 1.0]
    for E in range(bits - 1):
        F = bits - 2 - E
        p = [0.9 * j / 2**F + 0.1 for j in range(2**F + 1)]
        q = [(p[k] + p[k + 1]) / 2 * 10.0**-E for k in range(2**F)]
        values += q + [-value for value in q]
    return sorted(values)


_FORMULAS: dict[str, Callable[[int], list[float]]] = {
    "linear2": lambda bits: [x * abs(x) for x in _linear(bits)],
    "dt": _dynamic_tree,
    "linear": _linear,
    # For quantised scales, which are not negative.
    "squares": lambda bits: [(j / (2**bits - 1)) ** 2 for j in range(2**bits)],
}


def _values(mapping: str, bits: int) -> Tensor:
    return torch.tensor(_FORMULAS[mapping](bits), dtype=torch.float32, device="cpu")


def _borders(mapping: str, bits: int) -> Tensor:
    values = _values(mapping, bits).double()
    middle = (values[1:] + values[:-1]) / 2
    rounded = middle.float()
    down = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return torch.where(rounded.double() > middle, down, rounded)


class _Tables(dict[tuple[str, int, torch.device], Tensor]):
    """Tables by mapping, bits and device: a copy from the host at every use would synchronise."""

    def __init__(self, make: Callable[[str, int], Tensor]) -> None:
        self._make = make

    def __missing__(self, key: tuple[str, int, torch.device]) -> Tensor:
        mapping, bits, device = key
        table = self._make(mapping, bits).to(device)
        if type(table) is Tensor:  # not under a tracing or fake-tensor mode
            self[key] = table
        return table


CODEBOOKS, THRESHOLDS = _Tables(_values), _Tables(_borders)


def codebook(mapping: str, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the 2^bits values of a mapping, ascending, in float32.

    Args:
        mapping: R of the paper: ``"linear2"``, ``"dt"`` (dynamic tree) or ``"linear"``.
        bits: b of the paper.
        device: Where the codebook lives; one copy per device is kept.

    Returns:
        A tensor of shape (2^bits,). It is shared: do not write to it.
    """
    return CODEBOOKS[mapping, bits, torch.device(device)]


def thresholds(mapping: str, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the 2^bits - 1 borders between neighbouring codes, in float32; do not write to them.

    The nearest code of a float32 x is the number of thresholds below x; on a tie that is the
    lower index. A midpoint that is not a float32 is rounded *down*, which keeps the rule exact:
    the same float32 numbers lie above it.
    """
    return THRESHOLDS[mapping, bits, torch.device(device)]
