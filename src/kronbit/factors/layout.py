"""What a stack of square matrices is made of: tensors by name, and small helpers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kronbit.linalg.products import Operand, operand

# The tensors of a stack by name. Every one has the rows of the stack as its first axis.
Leaves: TypeAlias = dict[str, Tensor]
# Name -> (shape without the row axis, dtype).
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
# What is known of a matrix: nothing, that it is symmetric, or that it is lower triangular.
Shape: TypeAlias = Literal["square", "symmetric", "lower"]


def operand_of(stacks: Sequence[Tensor], order: int) -> Operand:
    """Stacks with no elements far above 1, one behind the other, as parts of a larger order."""
    larger = [enlarged(X, order) for X in stacks]
    return operand(larger[0] if len(larger) == 1 else torch.cat(larger), bound=1.0)


def enlarged(X: Tensor, order: int) -> Tensor:
    """A stack (k, n, n) as parts of larger matrices, which are the identity elsewhere."""
    k, n, _ = X.shape
    if n == order:
        return X
    larger = torch.eye(order, dtype=X.dtype, device=X.device).repeat(k, 1, 1)
    larger[:, :n, :n] = X
    return larger


def is_root(name: str) -> bool:
    """Whether a tensor belongs to the inverse root, not to the statistic."""
    return name.startswith("root")


def is_statistic(name: str) -> bool:
    """The opposite."""
    return not is_root(name)


def decay_weights(beta: float) -> tuple[float, float]:
    """Weights of the old statistic and of M: (β, 1 - β), or a plain sum for β = 1."""
    return (1.0, 1.0) if beta == 1 else (beta, 1 - beta)
