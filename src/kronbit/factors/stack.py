"""A batch of preconditioners of one order, and their inverse roots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.cholesky import Cholesky
from kronbit.factors.dense import Dense
from kronbit.factors.eigen import Eigen
from kronbit.factors.storage import Layout, Leaves, MatrixStorage, is_root
from kronbit.interruptions import to_the_end
from kronbit.linalg.backend import backend
from kronbit.linalg.orthogonal import FIRST_ATTEMPT, Attempt


class Method(Protocol):
    """The math of one way to keep a preconditioner: pure functions on a stack's tensors.

    Its statistic is something of its own: what is left of (λ, Ū), or of Q(A), after D. A part of
    it is ``statistic.part(rows, order)``: some matrices, without what they were enlarged by; and
    ``statistic.trace()`` is A's, (k,).
    """

    p: int
    root: MatrixStorage
    # Under which names further attempts at an update are counted, one after the other.
    repairs: tuple[str, ...]
    # And at a refresh: each with ten times the damping of the one before.
    root_repairs: tuple[str, ...]

    def enlarges(self, config: Config, attempt: int | None) -> bool:
        """Whether matrices can be parts of larger ones, without a trace in what comes of them.

        At an attempt of an update, or, if that is ``None``, at a refresh.
        """

    def layout(self, order: int) -> Layout:
        """Shapes and dtypes of one matrix and its root by name; a root's names begin "root"."""

    def start(self, eye: Tensor, value: float) -> Leaves:
        """A0 = value I; ``eye`` is (1, n, n)."""

    def restore(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Any:
        """D: the statistic of stacks, one behind the other, enlarged to this order."""

    def update(
        self, statistic: Any, M: Tensor, config: Config, attempt: Attempt
    ) -> tuple[Any, Tensor]:
        """PU: the new statistic, and whose can be trusted, bool (k,). M may be written to."""

    def encode(self, statistic: Any) -> Leaves:
        """Q: the tensors that stand for a new statistic, which may be written to."""

    def refresh(self, statistic: Any, config: Config) -> Tensor:
        """PIRU: the new root, (k, n, n); whatever, beyond the orders of enlarged matrices."""

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The matrix A that the statistic stands for."""

    def encode_matrix(self, A: Tensor) -> Leaves:
        """The statistic that stands for A."""

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """What ``diagnostics`` shows of a stack."""


def make_method(format: Format) -> Method:
    """The method of a format; ``"naive"`` is the dense one on a quantised matrix."""
    if format.method == "eigen":
        return Eigen(format)
    return Cholesky(format) if format.method == "cholesky" else Dense(format)


class Factors:
    """A stack of preconditioners of one order with their inverse p-th roots.

    The tensors are allocated once and only ever copied into: their slices are the optimizer's
    state. A stack may be a window of a larger one, so that rows of many stacks are neighbours.

    Args:
        order: n.
        rows: How many.
        format: How they are stored.
        start: A0 = start I.
        device: Where they are at work, and where the roots are.
        offload: Whether the statistics are in the host's memory instead.

    Attributes:
        layout: Name -> (shape, dtype) of one row.
        device: Where they are at work.
        offloaded: Whether the statistics are elsewhere.
        tensors: Name -> tensor with one row per block.
        whole: The tensors of the stack that this is a window of.
        first: Where the window begins there.
        counters: How often something was refused or repaired.
    """

    COUNTERS = (
        *Eigen.repairs,
        *Cholesky.repairs,
        *Cholesky.root_repairs,
        "discarded_statistics",
        "discarded_roots",
    )

    def __init__(
        self,
        order: int,
        rows: int,
        format: Format,
        start: float,
        device: torch.device | str,
        offload: bool = False,
    ) -> None:
        self.order, self.rows, self.format = order, rows, format
        self.method = make_method(format)
        self.counters = dict.fromkeys(self.COUNTERS, 0)
        # The identity is exact in every format, so Â0 = I is too.
        eye = torch.eye(order, device=device, dtype=torch.float32).unsqueeze(0)
        first = self.method.start(eye, start) | self.method.root.encode(eye.clone())
        self.layout = self.method.layout(order)
        self.device = eye.device
        self.offloaded = offload and self.device.type != "cpu"
        self.tensors: Leaves = {}
        for name, (shape, dtype) in self.layout.items():
            away = self.offloaded and not is_root(name)
            where = "cpu" if away else self.device
            pinned = away and self.device.type == "cuda"
            own = torch.empty((rows, *shape), dtype=dtype, device=where, pin_memory=pinned)
            self.tensors[name] = own.copy_(first[name].to(where))
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

    Attributes:
        replaced: bool (rows,): who got something new when something was written last.
    """

    def __init__(self, parts: Sequence[tuple[Factors, slice]]) -> None:
        self.replaced: Tensor | None = None
        self.method = parts[0][0].method
        self._fetched_to = parts[0][0].device if parts[0][0].offloaded else None
        self._order = max(factors.order for factors, _ in parts)
        stretches: list[tuple[Factors, slice]] = []
        for factors, rows in parts:
            start, stop = factors.first + rows.start, factors.first + rows.stop
            if stretches:
                before, known = stretches[-1]
                if before.whole is factors.whole and known.stop == start:
                    start = stretches.pop()[1].start
            stretches.append((factors, slice(start, stop)))
        # Tensors of the rows, their places in the batch, and their order.
        self._slices: list[tuple[Leaves, slice, int]] = []
        first = 0
        for factors, rows in stretches:
            leaves = {name: tensor[rows] for name, tensor in factors.whole.items()}
            here = slice(first, first + rows.stop - rows.start)
            self._slices.append((leaves, here, factors.order))
            first = here.stop

    def update(
        self, M: Tensor, finite: Tensor, config: Config, attempt: Attempt = FIRST_ATTEMPT
    ) -> tuple[Tensor, Tensor]:
        """PU. Where a factorisation fails, a row stays as it is.

        Args:
            M: The new G Gᵀ or Gᵀ G, (rows, n, n), finite; written to.
            finite: bool (rows,): False leaves the row as it is, whatever M says.
            config: β, t1 and the number of QR iterations.
            attempt: The first one, or a more robust one for rows where that has failed.

        Returns:
            bool (rows,) twice: whose factorisation can be trusted; and whose statistic was
            replaced, because it is finite, too.
        """
        new, good = self.method.update(self.restored(), M, config, attempt)
        encode = self.method.encode
        return good, self._keep(lambda rows, n: encode(new.part(rows, n)), finite & good)

    def refresh(self, config: Config) -> Tensor:
        """PIRU: ε, t2 and the number of Newton steps come from ``config``.

        Returns:
            bool (rows,): whose root was replaced, because it is finite.
        """
        scale = self._trace_scale() if config.trace_scaling else None
        new = self.method.refresh(self.restored(), config)
        if scale is not None:
            new *= scale
        encode = self.method.root.encode
        all_rows = torch.ones(len(new), dtype=torch.bool, device=new.device)
        return self._keep(lambda rows, n: encode(new[rows, :n, :n]), all_rows)

    def restored(self) -> Any:
        """D, on the device: what the method makes of its statistic, such as ``Triangle``."""
        slices = [leaves for leaves, _, _ in self._slices]
        if self._fetched_to is not None:
            slices = [
                {
                    name: leaf.to(self._fetched_to, non_blocking=True)
                    for name, leaf in leaves.items()
                    if not is_root(name)
                }
                for leaves in slices
            ]
        return self.method.restore(slices, self._order)

    def _trace_scale(self) -> Tensor:
        """What makes (A / √tr A)^(-1/p) of A^(-1/p); 1 for a zero matrix."""
        trace = self.restored().trace()
        scale = torch.where(trace == 0, 1.0, trace)
        for _ in range(self.method.p.bit_length()):  # the 2p-th root; not pow, see ``Eigen``
            scale.sqrt_()
        return scale[:, None, None]

    def _keep(self, encoded: Callable[[slice, int], Leaves], accepted: Tensor) -> Tensor:
        """Write new tensors where they are finite; elsewhere the old ones stay.

        All that takes memory comes before anything is written, and what has begun to be written is
        written to its end: whatever happens, codes and scales of a row belong together.

        Args:
            encoded: The new tensors of some rows of an order.
            accepted: bool (rows,): False, where the old ones stay anyway; given away.

        Returns:
            bool (rows,): who has new ones.
        """
        replacements = [
            Replacement.prepare(leaves, encoded(rows, order), accepted[rows])
            for leaves, rows, order in self._slices
        ]

        def write() -> None:
            for replacement in replacements:
                replacement.write()
            self.replaced = accepted

        to_the_end(write)
        return accepted


@dataclass(frozen=True)
class Replacement:
    """New tensors that will take the place of old ones, but for rows that are not finite.

    Attributes:
        old: Tensors that are overwritten. They may be in the host's memory.
        new: The new tensors, on the device.
        accepted: bool (rows,), contiguous: which rows are replaced. False where they are not
            finite, at the latest when they have been written.
        away: True if the old tensors are in the host's memory.
    """

    old: Sequence[Tensor]
    new: Sequence[Tensor]
    accepted: Tensor
    away: bool

    @classmethod
    def prepare(cls, old: Mapping[str, Tensor], new: Leaves, accepted: Tensor) -> Replacement:
        """Take all the memory that ``write`` needs. ``old`` may hold tensors of other names."""
        kept, leaves = [old[name] for name in new], list(new.values())
        away = kept[0].device != accepted.device
        if backend(accepted.device).by_kernels and not away:
            return cls(kept, [leaf.contiguous() for leaf in leaves], accepted, away)
        accepted &= _finite_rows(leaves)
        if away:
            leaves = [
                torch.where(_per_row(accepted, leaf), leaf, own.to(leaf.device, non_blocking=True))
                for own, leaf in zip(kept, leaves, strict=True)
            ]
        return cls(kept, leaves, accepted, away)

    def write(self) -> None:
        """Overwrite the old tensors. Takes no memory, and may be called again."""
        if not self.away:
            backend(self.accepted.device).replace_rows_(self.old, self.new, self.accepted)
            return
        for own, leaf in zip(self.old, self.new, strict=True):
            # who reads it on the host waits for the device first, as all updates do
            own.copy_(leaf, non_blocking=True)


def _per_row(values: Tensor, leaf: Tensor) -> Tensor:
    """(rows,) -> (rows, 1, ...), with the axes of a leaf."""
    return values.view(-1, *[1] * (leaf.dim() - 1))


def _finite_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Which rows hold finite numbers only. A non-finite element shows in its block's scale."""
    checks = [
        torch.linalg.vector_norm(leaf.flatten(1), ord=torch.inf, dim=1) < torch.inf
        for leaf in leaves
        if leaf.is_floating_point()
    ]
    together: Tensor = reduce(torch.logical_and, checks)
    return together
