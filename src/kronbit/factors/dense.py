"""Statistics stored as matrices: the paper's 32-bit Shampoo, and its naive low-bit baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.storage import Layout, Leaves, root_storage, statistic_storage
from kronbit.linalg.roots import inverse_root

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain


class Square(NamedTuple):
    """The matrices A themselves, (k, n, n)."""

    A: Tensor

    def part(self, rows: slice, order: int) -> Square:
        """Return the matrices of the given rows."""
        return Square(self.A[rows])

    def trace(self) -> Tensor:
        """Return the traces of A, (k,)."""
        return self.A.diagonal(dim1=-2, dim2=-1).sum(-1)


class Dense:
    """Stores A: A ← β A + (1 - β) M; Â = (A + λmax ε I)^(-1/p) by Schur-Newton.

    At 32 bits this is the method ``"dense"``. With fewer bits it is ``"naive"``, the paper's
    baseline: the same on the dequantised A, whose diagonal stays float32.
    """

    repairs: tuple[str, ...] = ()
    root_repairs: tuple[str, ...] = ()

    def __init__(self, format: Format) -> None:
        self.p = format.p
        self.statistic = statistic_storage(format, "matrix", "symmetric")
        self.root = root_storage(format)

    def allows_padding(self, config: Config, attempt: int | None) -> bool:
        """Return False: the iteration for a root starts from the norm of the whole matrix."""
        return False

    def layout(self, order: int) -> Layout:
        """Return the tensors of one matrix and its root."""
        return self.statistic.layout(order) | self.root.layout(order)

    def start(self, eye: Tensor, value: float) -> Leaves:
        """Return A0 = value I."""
        return self.statistic.encode(eye * value)

    def restore(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Square:
        """Return A of all stacks, concatenated: do not write to it."""
        stacks = [self.statistic.decode(leaves) for leaves in slices]
        return Square(stacks[0] if len(stacks) == 1 else torch.cat(stacks))

    def update(
        self, statistic: Square, M: Tensor, config: Config, attempt: int, chain: Chain | None
    ) -> tuple[Square, Tensor]:
        """PU: return the statistic with M averaged in."""
        decay, weight = decay_weights(config.beta)
        good = torch.ones(len(M), dtype=torch.bool, device=M.device)
        return Square((statistic.A * decay).add_(M, alpha=weight)), good

    def refresh(self, statistic: Square, config: Config) -> Tensor:
        """PIRU: return the root of the statistic."""
        return inverse_root(statistic.A, self.p, config.damping, config.newton_steps)

    def encode(self, statistic: Square) -> Leaves:
        """Q: return the tensors of A, which may be overwritten."""
        return self.statistic.encode(statistic.A)

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return A, float32: do not write to it."""
        return self.statistic.decode(leaves)

    def encode_matrix(self, A: Tensor) -> Leaves:
        """Encode a given A, which may be written to."""
        return self.statistic.encode(A)

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the condition number of A, for ``diagnostics``."""
        eigenvalues = torch.linalg.eigvalsh(self.matrix(leaves).double())
        return {"condition": condition(eigenvalues)}


def condition(eigenvalues: Tensor) -> float:
    """Return the largest ratio of largest to smallest eigenvalue in a stack (k, n)."""
    return float((eigenvalues.amax(-1) / eigenvalues.amin(-1).clamp(min=0)).amax())


def decay_weights(beta: float) -> tuple[float, float]:
    """Return the weights of the old statistic and of M: (β, 1 - β), or a plain sum for β = 1."""
    return (1.0, 1.0) if beta == 1 else (beta, 1 - beta)
