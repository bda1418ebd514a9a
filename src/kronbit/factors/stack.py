"""A batch of preconditioners of one order, and their inverse roots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.dense import Dense
from kronbit.factors.eigen import Eigen
from kronbit.factors.storage import Layout, Leaves, MatrixStorage
from kronbit.linalg import QR, cholesky_qr


class Method(Protocol):
    """The math of one way to keep a preconditioner: pure functions on a stack's tensors."""

    p: int
    root: MatrixStorage
    takes_qr: bool

    def layout(self, order: int) -> Layout:
        """Shapes and dtypes of one matrix and its root by name; a root's names begin "root"."""

    def start(self, eye: Tensor, value: float) -> Leaves:
        """A0 = value I; ``eye`` is (1, n, n)."""

    def update(
        self, leaves: Mapping[str, Tensor], M: Tensor, config: Config, qr: QR
    ) -> tuple[Leaves, Tensor]:
        """PU: the new statistic, and whose can be trusted, bool (k,). M may be written to."""

    def refresh(self, leaves: Mapping[str, Tensor], config: Config) -> Leaves:
        """PIRU: the new root."""

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The matrix A that the statistic stands for."""

    def encode_matrix(self, A: Tensor) -> Leaves:
        """The statistic that stands for A."""

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """What ``diagnostics`` shows of a stack."""


def make_method(format: Format, p: int) -> Method:
    """The method of a format; ``"naive"`` is the dense one on a quantised matrix."""
    return Eigen(format, p) if format.method == "eigen" else Dense(format, p)


class Factors:
    """A stack of preconditioners of one order with their inverse p-th roots.

    The tensors are allocated once and only ever copied into: their slices are the optimizer's
    state.

    Attributes:
        layout: Name -> (shape, dtype) of one row.
        tensors: Name -> tensor with one row per block.
        counters: On the stack's device, how often something was refused or repaired.
    """

    COUNTERS = ("householder", "discarded_statistics", "discarded_roots")

    def __init__(
        self,
        order: int,
        rows: int,
        format: Format,
        p: int,
        start: float,
        device: torch.device | str,
    ) -> None:
        self.order, self.rows, self.format = order, rows, format
        self.method = make_method(format, p)
        self.counters = {
            name: torch.zeros((), dtype=torch.int64, device=device) for name in self.COUNTERS
        }
        # The identity is exact in every format, so Â0 = I is too.
        eye = torch.eye(order, device=device, dtype=torch.float32).unsqueeze(0)
        first = self.method.start(eye, start) | self.method.root.encode(eye.clone())
        self.layout = self.method.layout(order)
        self.tensors = {
            name: torch.empty((rows, *shape), dtype=dtype, device=device).copy_(first[name])
            for name, (shape, dtype) in self.layout.items()
        }

    def roots(self, rows: slice) -> Tensor:
        """Â of some rows, float32: do not write to it."""
        return self.method.root.decode(self.leaves(rows))

    def is_identity(self, rows: slice) -> Tensor:
        """Whose root is still exactly I, as bool (len(rows),)."""
        roots = self.roots(rows)
        eye = torch.eye(self.order, dtype=roots.dtype, device=roots.device)
        return (roots == eye).flatten(1).all(1)

    def figures(self) -> dict[str, float]:
        """The worst of each figure over all rows, for ``diagnostics``. Waits for the device."""
        worst: dict[str, float] = {}
        for row in range(self.rows):
            for name, value in self.method.figures(self.leaves(slice(row, row + 1))).items():
                worst[name] = max(value, worst.get(name, value))
        return worst

    def slot(self, row: int) -> Leaves:
        """The state of one row: views, in the order of the layout."""
        return {name: tensor[row] for name, tensor in self.tensors.items()}

    def leaves(self, rows: slice) -> Leaves:
        """The tensors of some rows: views."""
        return {name: tensor[rows] for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Batch:
    """Rows of several stacks of one order and one format, handled as one.

    Attributes:
        parts: (stack, rows) in order.
    """

    parts: tuple[tuple[Factors, slice], ...]

    @property
    def method(self) -> Method:
        """The method of all parts."""
        return self.parts[0][0].method

    def update(self, M: Tensor, finite: Tensor, config: Config, qr: QR = cholesky_qr) -> Tensor:
        """PU. Where the QR fails, a row stays as it is.

        Args:
            M: The new G Gᵀ or Gᵀ G, (rows, n, n), finite; written to.
            finite: bool (rows,): False leaves the row as it is, whatever M says.
            config: β, t1 and the number of QR iterations.
            qr: ``cholesky_qr``, or ``householder_qr`` for rows where that has failed.

        Returns:
            bool (rows,): whose QR has failed.
        """
        old = self._leaves()
        new, good = self.method.update(old, M, config, qr)
        self._keep(old, new, "discarded_statistics", finite & good)
        return finite & ~good

    def refresh(self, config: Config) -> None:
        """PIRU: ε, t2 and the number of Newton steps come from ``config``."""
        old = self._leaves()
        new = self.method.refresh(old, config)
        rows = sum(rows.stop - rows.start for _, rows in self.parts)
        trusted = torch.ones(rows, dtype=torch.bool, device=next(iter(old.values())).device)
        self._keep(old, new, "discarded_roots", trusted)

    def _leaves(self) -> Leaves:
        slices = [factors.leaves(rows) for factors, rows in self.parts]
        if len(slices) == 1:
            return slices[0]
        return {name: torch.cat([leaves[name] for leaves in slices]) for name in slices[0]}

    def _keep(self, old: Mapping[str, Tensor], new: Leaves, counter: str, trusted: Tensor) -> None:
        """Copy new tensors in where they are trusted and finite; elsewhere the old ones stay."""
        finite = _finite_rows(new)
        refused, accepted = trusted & ~finite, trusted & finite
        chosen = {
            name: torch.where(accepted.view(-1, *[1] * (leaf.dim() - 1)), leaf, old[name])
            for name, leaf in new.items()
        }
        start = 0
        for factors, rows in self.parts:
            here = slice(start, start + rows.stop - rows.start)
            start = here.stop
            factors.counters[counter] += refused[here].sum()
            for name, leaf in chosen.items():
                factors.tensors[name][rows].copy_(leaf[here])


def _finite_rows(leaves: Mapping[str, Tensor]) -> Tensor:
    """Which rows hold finite numbers only. A non-finite element shows in its block's scale."""
    checks = [
        torch.isfinite(torch.linalg.vector_norm(leaf.flatten(1), ord=torch.inf, dim=1))
        for leaf in leaves.values()
        if leaf.is_floating_point()
    ]
    return torch.stack(checks).all(0)
