"""Statistics as Cholesky factors: half as many elements, and always positive semi-definite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.dense import condition, decay_weights
from kronbit.factors.storage import Layout, Leaves, root_storage, statistic_storage
from kronbit.linalg.backend import backend
from kronbit.linalg.products import multiply, operand
from kronbit.linalg.roots import converged_inverse_root

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain

# Jitter relative to the mean of A's diagonal, tried in this order if A is singular up to rounding.
_JITTERS = tuple(10.0**exponent for exponent in range(-7, -1))


class Triangle(NamedTuple):
    """Lower triangular matrices C (k, n, n), zero above the diagonal.

    Attributes:
        C: The matrices.
        smaller: Rows whose matrices are padded with zeros, each with the order before padding.
    """

    C: Tensor
    smaller: tuple[tuple[slice, int], ...] = ()

    def part(self, rows: slice, order: int) -> Triangle:
        """Return the matrices of the given rows without their padding."""
        return Triangle(self.C[rows, :order, :order])

    def orders(self) -> Tensor | None:
        """Return the orders before padding, int32 (k,), on the device; None without padding."""
        if not self.smaller:
            return None
        k, largest, _ = self.C.shape
        # Name the device: the user may have set another default.
        orders = torch.full((k,), largest, dtype=torch.int32, device="cpu")
        for rows, n in self.smaller:
            orders[rows] = n
        if self.C.device.type == "cuda":
            orders = orders.pin_memory()
        return orders.to(self.C.device, non_blocking=True)

    def trace(self) -> Tensor:
        """Return the traces of C Cᵀ, (k,)."""
        # In two steps, so that threads never split the sum of a row.
        return self.C.square().sum(-1).sum(-1)

    def square(self) -> Tensor:
        """Return A = C Cᵀ."""
        k, n, _ = self.C.shape
        c = operand(self.C)
        A = backend(self.C.device).evaluation_buffer(k, n, self.C.device)
        return multiply(c, c.mT, symmetric=True, triangular=True, out=A)


class Cholesky:
    """Stores C with A = C Cᵀ: the diagonal in float32, all other elements quantised.

    C Cᵀ is positive semi-definite whatever the quantisation error. The error also matters less,
    since the condition number of C is the square root of A's.
    """

    repairs: tuple[str, ...] = ("jittered",)
    root_repairs: tuple[str, ...] = ("redamped",)

    def __init__(self, format: Format) -> None:
        self.p = format.p
        self.factor = statistic_storage(format, "factor", "lower")
        self.root = root_storage(format)

    def allows_padding(self, config: Config, attempt: int | None) -> bool:
        """True unless jitter or a trace may be needed, which depends on the whole matrix."""
        return not config.trace_scaling if attempt is None else attempt == 0 and config.beta > 0

    def layout(self, order: int) -> Layout:
        """Return the tensors of one factor and its root."""
        return self.factor.layout(order) | self.root.layout(order)

    def start(self, eye: Tensor, value: float) -> Leaves:
        """Return A0 = value I as C0 = √value I."""
        return self.factor.encode(eye * value**0.5)

    def restore(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Triangle:
        """Return C of all stacks, concatenated and padded with zeros: do not write to it."""
        if len(slices) == 1:
            return Triangle(self.factor.decode(slices[0]))
        # The first tensor of a factor, its diagonal or C itself, ends in an axis of its order.
        firsts = [next(iter(leaves.values())) for leaves in slices]
        mixed = any(first.shape[-1] < order for first in firsts)
        make = torch.zeros if mixed else torch.empty
        size = sum(map(len, firsts)), order, order
        C = make(size, dtype=torch.float32, device=firsts[0].device)
        smaller: list[tuple[slice, int]] = []
        start = 0
        for leaves, first in zip(slices, firsts, strict=True):
            rows, n = slice(start, start + len(first)), first.shape[-1]
            self.factor.decode(leaves, C[rows, :n, :n])
            smaller += [(rows, n)] if n < order else []
            start = rows.stop
        return Triangle(C, tuple(smaller))

    def update(
        self, statistic: Triangle, M: Tensor, config: Config, attempt: int, chain: Chain | None
    ) -> tuple[Triangle, Tensor]:
        """PU: return the factor of β C Cᵀ + (1 - β) M. The second attempt adds jitter if needed."""
        decay, weight = decay_weights(config.beta)
        c = operand(statistic.C)
        A = multiply(c, c.mT, C=M, alpha=decay, beta=weight, symmetric=True, triangular=True, out=M)
        for rows, n in statistic.smaller:  # a zero block has no Cholesky factor
            A[rows].diagonal(dim1=-2, dim2=-1)[:, n:].fill_(1.0)
        del c, statistic
        if attempt == 0:
            C, good = backend(A.device).cholesky_(A, chain)
            return Triangle(C), good
        return _jittered(A)

    def refresh(self, statistic: Triangle, config: Config) -> Tensor:
        """PIRU: return the root of C Cᵀ, iterated to convergence."""
        A, orders = statistic.square(), statistic.orders()
        del statistic
        return converged_inverse_root(A, self.p, config.damping, orders)

    def encode(self, statistic: Triangle) -> Leaves:
        """Q: return the tensors of C, which may be overwritten."""
        return self.factor.encode(statistic.C)

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return A = C Cᵀ, float32."""
        return Triangle(self.factor.decode(leaves)).square()

    def encode_matrix(self, A: Tensor) -> Leaves:
        """Encode a given A, which may be singular: C = Rᵀ with Q R = √Λ Vᵀ."""
        lam, V = torch.linalg.eigh(A.double())
        R = torch.linalg.qr(lam.clamp(min=0).sqrt().unsqueeze(-1) * V.mT).R
        signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        return self.factor.encode((R * signs.unsqueeze(-1)).mT.float().contiguous())

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """Return a lower bound on A's condition number, from the pivots, for ``diagnostics``."""
        pivots = self.factor.decode(leaves).diagonal(dim1=-2, dim2=-1).double()
        return {"condition_at_least": condition(pivots.square())}


def _jittered(A: Tensor) -> tuple[Triangle, Tensor]:
    """Return the factor of A + jitter I, with the least jitter that makes it positive definite.

    The jitter is then subtracted from the factor's diagonal, so that the statistic does not grow.
    """
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    original, mean = diagonal.clone(), diagonal.mean(-1, keepdim=True)
    # A positive semi-definite matrix with a zero diagonal is zero, and so is its factor.
    good = (original == 0).all(-1)
    C = torch.where(good[:, None, None], 0.0, torch.full_like(A, torch.nan))
    for jitter in _JITTERS:
        diagonal.copy_(original + jitter * mean)
        candidate, positive = backend(A.device).cholesky_(A.clone())
        pivots = candidate.diagonal(dim1=-2, dim2=-1)
        pivots.copy_((pivots.square() - jitter * mean).clamp_(min=0).sqrt_())
        new = positive & ~good
        C = torch.where(new[:, None, None], candidate, C)
        good = good | new
        if bool(good.all()):
            break
    return Triangle(C), good
