"""A batch of preconditioners of one order, and their inverse roots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.dense import Dense
from kronbit.factors.eigen import Eigen
from kronbit.factors.storage import Layout, Leaves, MatrixStorage


class Method(Protocol):
    """The math of one way to keep a preconditioner: pure functions on a stack's tensors."""

    p: int
    root: MatrixStorage

    def layout(self, order: int) -> Layout:
        """Shapes and dtypes of one matrix and its root by name; a root's names begin "root"."""

    def start(self, eye: Tensor, value: float) -> Leaves:
        """A0 = value I; ``eye`` is (1, n, n)."""

    def update(
        self, leaves: Mapping[str, Tensor], M: Tensor, config: Config, fallbacks: Tensor
    ) -> Leaves:
        """PU: the new statistic."""

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

    def update(self, rows: slice, M: Tensor, trusted: Tensor, config: Config) -> None:
        """PU on some rows.

        Args:
            rows: Which.
            M: Their new G Gᵀ or Gᵀ G, (len(rows), n, n), finite.
            trusted: bool (len(rows),): False leaves the row as it is, whatever M says.
            config: β, t1 and the number of QR iterations.
        """
        leaves = self.method.update(
            self._slices(rows), M, config, fallbacks=self.counters["householder"]
        )
        self._keep(rows, leaves, "discarded_statistics", trusted)

    def refresh(self, rows: slice, config: Config) -> None:
        """PIRU on some rows: ε, t2 and the number of Newton steps come from ``config``."""
        leaves = self.method.refresh(self._slices(rows), config)
        self._keep(rows, leaves, "discarded_roots")

    def roots(self, rows: slice) -> Tensor:
        """Â of some rows, float32: do not write to it."""
        return self.method.root.decode(self._slices(rows))

    def is_identity(self, rows: slice) -> Tensor:
        """Whose root is still exactly I, as bool (len(rows),)."""
        roots = self.roots(rows)
        eye = torch.eye(self.order, dtype=roots.dtype, device=roots.device)
        return (roots == eye).flatten(1).all(1)

    def figures(self) -> dict[str, float]:
        """The worst of each figure over all rows, for ``diagnostics``. Waits for the device."""
        worst: dict[str, float] = {}
        for row in range(self.rows):
            for name, value in self.method.figures(self._slices(slice(row, row + 1))).items():
                worst[name] = max(value, worst.get(name, value))
        return worst

    def slot(self, row: int) -> Leaves:
        """The state of one row: views, in the order of the layout."""
        return {name: tensor[row] for name, tensor in self.tensors.items()}

    def _slices(self, rows: slice) -> Leaves:
        return {name: tensor[rows] for name, tensor in self.tensors.items()}

    def _keep(
        self, rows: slice, leaves: Leaves, counter: str, trusted: Tensor | None = None
    ) -> None:
        """Copy new tensors in where they are trusted and finite; elsewhere the old ones stay."""
        finite = _finite_rows(leaves)
        trusted = torch.ones_like(finite) if trusted is None else trusted
        self.counters[counter] += (trusted & ~finite).sum()
        accepted = trusted & finite
        for name, new in leaves.items():
            target = self.tensors[name][rows]
            target.copy_(torch.where(accepted.view(-1, *[1] * (new.dim() - 1)), new, target))


def _finite_rows(leaves: Mapping[str, Tensor]) -> Tensor:
    """Which rows hold finite numbers only. A non-finite element shows in its block's scale."""
    checks = [
        torch.isfinite(torch.linalg.vector_norm(leaf.flatten(1), ord=torch.inf, dim=1))
        for leaf in leaves.values()
        if leaf.is_floating_point()
    ]
    return torch.stack(checks).all(0)
