"""Rules that combine a gradient with two roots, and grafting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from kronbit.linalg.backend import Backend

_GRAFT_FLOOR = 1e-12


class Pass(NamedTuple):
    """One pass of a rule: X ← L̂ X, X ← X R̂, or their sum, X ← L̂ X + X R̂."""

    left: bool
    right: bool


# Passes that turn X = G into X = Ĝ. A rule is data, not a function, so that kernels can read it.
Rule: TypeAlias = tuple[Pass, ...]

# Shampoo: Ĝ = L̂ G R̂.
KRONECKER: Rule = (Pass(left=False, right=True), Pass(left=True, right=False))
# CASPR: J = L̂ G + G R̂, Ĝ = L̂ J + J R̂.
CASPR: Rule = (Pass(left=True, right=True), Pass(left=True, right=True))


@dataclass(frozen=True)
class Algorithm:
    """A second-order method.

    Attributes:
        rule: (L̂, G, R̂) -> Ĝ.
        options: Defaults that differ from those of ``Config``: pairs of names and values.
    """

    rule: Rule
    options: tuple[tuple[str, Any], ...] = ()


def combine(rule: Rule, L: Tensor, G: Tensor, R: Tensor) -> Tensor:
    """Return Ĝ for stacks L̂ (k, m, m), G (k, m, n), R̂ (k, n, n), computed in torch."""
    X = G
    for step in rule:
        left = Backend.multiply(L, X) if step.left else None
        X = Backend.multiply(X, R, left) if left is None or step.right else left
    return X


def graft_scale(G_norm: Tensor, Ghat_norm: Tensor) -> Tensor:
    """Return ‖G‖_F / (‖Ĝ‖_F + 1e-12), which scales Ĝ to the norm of G; 0 for a zero gradient."""
    return G_norm / (Ghat_norm + _GRAFT_FLOOR)
