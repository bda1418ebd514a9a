"""A batch of preconditioners of one order, and their inverse roots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.dense import Dense
from kronbit.factors.eigen import Eigen
from kronbit.factors.storage import Layout, Leaves, MatrixStorage, is_root
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
    state. A stack may be a window of a larger one, so that rows of many stacks are neighbours.

    Attributes:
        layout: Name -> (shape, dtype) of one row.
        tensors: Name -> tensor with one row per block.
        whole: The tensors of the stack that this is a window of.
        first: Where the window begins there.
        counters: How often something was refused or repaired.
    """

    COUNTERS = ("repeated_qr", "householder", "discarded_statistics", "discarded_roots")

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
        self.counters = dict.fromkeys(self.COUNTERS, 0)
        # The identity is exact in every format, so Â0 = I is too.
        eye = torch.eye(order, device=device, dtype=torch.float32).unsqueeze(0)
        first = self.method.start(eye, start) | self.method.root.encode(eye.clone())
        self.layout = self.method.layout(order)
        self.tensors = {
            name: torch.empty((rows, *shape), dtype=dtype, device=device).copy_(first[name])
            for name, (shape, dtype) in self.layout.items()
        }
        self.whole, self.first = self.tensors, 0

    def window(self, first: int, rows: int) -> Factors:
        """Some rows as a stack of their own, with counters of its own."""
        part = copy(self)
        part.rows, part.first = rows, self.first + first
        part.counters = dict.fromkeys(self.COUNTERS, 0)
        part.tensors = self.leaves(slice(first, first + rows))
        return part

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


class Batch:
    """Rows of several stacks of one format, handled as one.

    Args:
        parts: (stack, rows) in order. Neighbours in one whole need no copies. If orders differ,
            all are enlarged to the largest.
    """

    def __init__(self, parts: Sequence[tuple[Factors, slice]]) -> None:
        self.method = parts[0][0].method
        orders = {factors.order for factors, _ in parts}
        self._order = max(orders) if len(orders) > 1 else None
        stretches: list[tuple[Leaves, slice]] = []
        for factors, rows in parts:
            start, stop = factors.first + rows.start, factors.first + rows.stop
            if stretches and stretches[-1][0] is factors.whole and stretches[-1][1].stop == start:
                start = stretches.pop()[1].start
            stretches.append((factors.whole, slice(start, stop)))
        self._slices = [
            {name: tensor[rows] for name, tensor in whole.items()} for whole, rows in stretches
        ]

    def update(
        self, M: Tensor, finite: Tensor, config: Config, qr: QR = cholesky_qr
    ) -> tuple[Tensor, Tensor]:
        """PU. Where the QR fails, a row stays as it is.

        Args:
            M: The new G Gᵀ or Gᵀ G, (rows, n, n), finite; written to.
            finite: bool (rows,): False leaves the row as it is, whatever M says.
            config: β, t1 and the number of QR iterations.
            qr: ``cholesky_qr``, or a more robust one for rows where that has failed.

        Returns:
            bool (rows,) twice: whose QR can be trusted; and whose statistic was replaced, because
            it is finite, too.
        """
        new, good = self.method.update(self._statistics(), M, config, qr)
        return good, self._keep(new, finite & good)

    def refresh(self, config: Config) -> Tensor:
        """PIRU: ε, t2 and the number of Newton steps come from ``config``.

        Returns:
            bool (rows,): whose root was replaced, because it is finite.
        """
        return self._keep(self.method.refresh(self._statistics(), config), None)

    def _statistics(self) -> Leaves:
        """All tensors but those of the roots."""
        slices = self._slices
        if self._order is not None:
            assert isinstance(self.method, Eigen), "no other method is mixed"
            slices = [self.method.enlarged(leaves, self._order) for leaves in slices]
        first, *others = slices
        names = [name for name in first if not is_root(name)]
        if not others:
            return {name: first[name] for name in names}
        return {name: torch.cat([leaves[name] for leaves in slices]) for name in names}

    def _keep(self, new: Leaves, trusted: Tensor | None) -> Tensor:
        """Write new tensors where they are trusted and finite; elsewhere the old ones stay.

        Returns:
            bool (rows,): where that was.
        """
        accepted = _finite_rows(new)
        if trusted is not None:
            accepted &= trusted
        start = 0
        for leaves in self._slices:
            rows = slice(start, start + len(next(iter(leaves.values()))))
            start = rows.stop
            for name, leaf in new.items():
                old = leaves[name]
                inside = (rows, *(slice(side) for side in old.shape[1:]))
                mask = accepted[rows].view(-1, *[1] * (leaf.dim() - 1))
                torch.where(mask, leaf[inside], old, out=old)
        return accepted


def _finite_rows(leaves: Mapping[str, Tensor]) -> Tensor:
    """Which rows hold finite numbers only. A non-finite element shows in its block's scale."""
    checks = [
        torch.linalg.vector_norm(leaf.flatten(1), ord=torch.inf, dim=1) < torch.inf
        for leaf in leaves.values()
        if leaf.is_floating_point()
    ]
    together: Tensor = reduce(torch.logical_and, checks)
    return together
