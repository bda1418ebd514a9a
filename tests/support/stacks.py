"""Stacks of factors, and the oracle's single matrices to compare them with."""

from __future__ import annotations

from typing import Any

import torch
from support import oracle
from torch import Tensor

from kronbit.config import Config
from kronbit.factors import Batch, Factors
from kronbit.quantization.reference import unpack


def stack(n: int, rows: int, config: Config, device: torch.device | str = "cpu") -> Factors:
    return Factors(n, rows, config.format(n), config.damping, device)


def all_rows(factors: Factors) -> slice:
    return slice(0, factors.rows)


def all_trusted(factors: Factors) -> Tensor:
    return torch.ones(
        factors.rows, dtype=torch.bool, device=next(iter(factors.tensors.values())).device
    )


def update(
    factors: Factors, M: Tensor, trusted: Tensor, config: Config, rows: slice | None = None
) -> int:
    """Update rows as the preconditioner does. Rows that fail are updated again by the last repair.

    Returns:
        The number of refused rows.
    """
    rows = all_rows(factors) if rows is None else rows
    good, replaced = Batch([(factors, rows)]).update(M.clone(), trusted, config)
    count = int((trusted & good & ~replaced).sum())
    for i, repeat in enumerate((trusted & ~good).tolist()):
        if repeat:
            one = Batch([(factors, slice(rows.start + i, rows.start + i + 1))])
            index = slice(i, i + 1)
            last = len(factors.method.repairs)
            _, replaced = one.update(M[index].clone(), trusted[index], config, last)
            count += int(~replaced)
    return count


def refresh(factors: Factors, config: Config, rows: slice | None = None) -> list[bool]:
    """Refresh roots. Return a list with True for each row whose root was replaced."""
    replaced = Batch([(factors, all_rows(factors) if rows is None else rows)]).refresh(config)
    return list(replaced.tolist())


def gram(rows: int, n: int, generator: torch.Generator) -> Tensor:
    G = torch.randn(rows, n, n + 5, generator=generator, dtype=torch.float64) / n**0.5
    return (G @ G.mT).float()


def codes(factors: Factors, name: str, row: int, bits: int) -> list[list[int]]:
    return unpack(factors.tensors[name][row].cpu(), bits, factors.order).tolist()


def run_both(
    n: int, device: torch.device, dtype: torch.dtype, updates: int = 3, **options: Any
) -> tuple[Factors, list[oracle.Factor]]:
    """Update and refresh three matrices, as a stack and one by one by the oracle."""
    config = Config(**{"storage": "paper", **options})
    factors = stack(n, 3, config, device)
    expected = [oracle.Factor(n, oracle.Options(**options), dtype) for _ in range(3)]
    generator = torch.Generator().manual_seed(n)
    for _ in range(updates):
        M = gram(3, n, generator)
        update(factors, M.to(device), all_trusted(factors), config)
        for single, m in zip(expected, M, strict=True):
            single.update(m.to(dtype))
    refresh(factors, config)
    for single in expected:
        single.refresh()
    return factors, expected
