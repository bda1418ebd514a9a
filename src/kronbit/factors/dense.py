"""Preconditioners kept as themselves: the paper's 32-bit Shampoo, and its naive low-bit one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.storage import Layout, Leaves, MatrixStorage, decay_weights, root_storage
from kronbit.linalg import QR, inverse_root


class Dense:
    """A ← β A + (1 - β) M; Â = (A + λmax ε I)^(-1/p) by Schur-Newton.

    With a 32-bit quantiser this is the method ``"dense"``. With fewer bits it is ``"naive"``, the
    paper's baseline: the same on the dequantised A, whose diagonal stays float32.
    """

    takes_qr = False

    def __init__(self, format: Format, p: int) -> None:
        self.p = p
        self.statistic = MatrixStorage(format.statistic, plain="matrix")
        self.root = root_storage(format.root)

    def layout(self, order: int) -> Layout:
        """Tensors of one matrix and its root."""
        return self.statistic.layout(order) | self.root.layout(order)

    def start(self, eye: Tensor, value: float) -> Leaves:
        """A0 = value I."""
        return self.statistic.encode(eye * value)

    def update(
        self, leaves: Mapping[str, Tensor], M: Tensor, config: Config, qr: QR
    ) -> tuple[Leaves, Tensor]:
        """PU: the statistic with M averaged in."""
        decay, weight = decay_weights(config.beta)
        A = (self.statistic.decode(leaves) * decay).add_(M, alpha=weight)
        good = torch.ones(len(M), dtype=torch.bool, device=M.device)
        return self.statistic.encode(A), good

    def refresh(self, leaves: Mapping[str, Tensor], config: Config) -> Leaves:
        """PIRU: the root of the statistic."""
        A = self.statistic.decode(leaves)
        return self.root.encode(inverse_root(A, self.p, config.damping, config.newton_steps))

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """A, float32: do not write to it."""
        return self.statistic.decode(leaves)

    def encode_matrix(self, A: Tensor) -> Leaves:
        """The statistic that stands for a given A, which may be written to."""
        return self.statistic.encode(A)

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """Condition of A for ``diagnostics``."""
        eigenvalues = torch.linalg.eigvalsh(self.matrix(leaves).double())
        return {"condition": condition(eigenvalues)}


def condition(eigenvalues: Tensor) -> float:
    """The largest ratio of largest to smallest eigenvalue in a stack (k, n)."""
    return float((eigenvalues.amax(-1) / eigenvalues.amin(-1).clamp(min=0)).amax())
