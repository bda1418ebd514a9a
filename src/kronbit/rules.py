"""What tells the algorithms apart: how a gradient and two roots combine; and grafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# (L̂, G, R̂) -> Ĝ on stacks (k, m, m), (k, m, n), (k, n, n).
Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_GRAFT_FLOOR = 1e-12


@dataclass(frozen=True)
class Algorithm:
    """A second-order method.

    Attributes:
        rule: (L̂, G, R̂) -> Ĝ.
        p: L̂ = L^(-1/p) and R̂ = R^(-1/p).
    """

    rule: Rule
    p: int


def kronecker(L: Tensor, G: Tensor, R: Tensor) -> Tensor:
    """Shampoo: Ĝ = L̂ G R̂."""
    return L @ G @ R


def caspr(L: Tensor, G: Tensor, R: Tensor) -> Tensor:
    """CASPR: J = L̂ G + G R̂, Ĝ = L̂ J + J R̂."""
    J = torch.baddbmm(L @ G, G, R)
    return torch.baddbmm(L @ J, J, R)


def graft_scale(G_norm: Tensor, Ghat_norm: Tensor) -> Tensor:
    """‖G‖_F / (‖Ĝ‖_F + 1e-12), the factor that gives Ĝ the norm of G; 0 for a zero gradient."""
    return G_norm / (Ghat_norm + _GRAFT_FLOOR)
