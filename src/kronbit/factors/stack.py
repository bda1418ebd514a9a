"""Stacks of preconditioners of one order with their inverse roots, and batches of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kronbit.config import Config, Format
from kronbit.factors.cholesky import Cholesky
from kronbit.factors.dense import Dense
from kronbit.factors.eigen import Eigen
from kronbit.factors.storage import Layout, Leaves, MatrixStorage, is_root
from kronbit.interruptions import run_then
from kronbit.linalg.backend import backend

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain


class Method(Protocol):
    """A way to store a preconditioner A and its root: pure functions on a stack's tensors.

    Q quantises and D restores. Each method has a type for its statistic, the result of D, such
    as (λ, V). ``statistic.part(rows, order)`` returns the matrices of rows without their padding,
    and ``statistic.trace()`` returns the traces of A, (k,).
    """

    p: int
    root: MatrixStorage
    # Names of the counters of repeated attempts at an update, in order.
    repairs: tuple[str, ...]
    # Names of the counters of repeated attempts at a refresh, each with ten times the damping.
    root_repairs: tuple[str, ...]

    def allows_padding(self, config: Config, attempt: int | None) -> bool:
        """True if padding matrices to a larger order does not change the results.

        ``attempt`` counts the attempts at an update; it is ``None`` for a refresh.
        """

    def layout(self, order: int) -> Layout:
        """Return name -> (shape, dtype); names that begin with "root" belong to the root."""

    def start(self, eye: Tensor, value: float) -> Leaves:
        """Return A0 = value I; ``eye`` is (1, n, n)."""

    def restore(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Any:
        """D: return the statistic of all stacks, concatenated, and padded to this order."""

    def update(
        self, statistic: Any, M: Tensor, config: Config, attempt: int, chain: Chain | None
    ) -> tuple[Any, Tensor]:
        """PU: return the new statistic, and bool (k,), True if trusted. M may be overwritten.

        Attempts count from 0; later attempts are more robust. ``chain`` launches the factorisations
        of the first attempt, if kernels compute them.
        """

    def encode(self, statistic: Any) -> Leaves:
        """Q: return the tensors of a new statistic, which may be overwritten."""

    def refresh(self, statistic: Any, config: Config) -> Tensor:
        """PIRU: return the new root, (k, n, n); its padding is undefined."""

    def matrix(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the matrix A of a statistic."""

    def encode_matrix(self, A: Tensor) -> Leaves:
        """Return the tensors of the statistic of A."""

    def figures(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """Return figures of a stack for ``diagnostics``."""


def make_method(format: Format) -> Method:
    """Return the method of a format; ``"naive"`` is the dense one on a quantised matrix."""
    if format.method == "eigen":
        return Eigen(format)
    return Cholesky(format) if format.method == "cholesky" else Dense(format)


class Factors:
    """A stack of preconditioners of one order with their inverse p-th roots.

    The tensors are allocated once and only ever copied into: their slices are the optimizer's
    state. A stack may be a window of a larger one.

    Args:
        order: n.
        rows: Number of preconditioners.
        format: Storage format.
        start: A0 = start I.
        device: Device of the math, and of the roots.
        offload: True if the statistics are kept in host memory.

    Attributes:
        layout: Name -> (shape, dtype) of one row.
        device: Device of the math.
        offloaded: True if the statistics are in host memory, and the device is not the CPU.
        tensors: Name -> tensor with one row per block.
        whole: The tensors of the larger stack, if this is a window of one; else ``tensors``.
        first: The first row of the window.
        counters: Numbers of repairs and of discarded results.
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
            on_host = self.offloaded and not is_root(name)
            where = "cpu" if on_host else self.device
            pinned = on_host and self.device.type == "cuda"
            tensor = torch.empty((rows, *shape), dtype=dtype, device=where, pin_memory=pinned)
            self.tensors[name] = tensor.copy_(first[name].to(where))
        self.whole, self.first = self.tensors, 0

    def window(self, first: int, rows: int) -> Factors:
        """Return a window of adjacent rows, with counters that start at 0."""
        part = copy(self)
        part.rows, part.first = rows, self.first + first
        part.counters = dict.fromkeys(self.COUNTERS, 0)
        part.tensors = self.leaves(slice(first, first + rows))
        return part

    def roots(self, rows: slice) -> Tensor:
        """Return Â of the given rows, float32: do not write to it."""
        return self.method.root.decode(self.leaves(rows))

    def is_identity(self, rows: slice) -> Tensor:
        """Return bool (len(rows),), True if a root is still exactly I."""
        roots = self.roots(rows)
        eye = torch.eye(self.order, dtype=roots.dtype, device=roots.device)
        return (roots == eye).flatten(1).all(1)

    def figures(self) -> dict[str, float]:
        """Return the worst value of each figure over all rows. Waits for the device."""
        worst: dict[str, float] = {}
        for row in range(self.rows):
            for name, value in self.method.figures(self.leaves(slice(row, row + 1))).items():
                worst[name] = max(value, worst.get(name, value))
        return worst

    def slot(self, row: int) -> Leaves:
        """Return views of the state of one row, in the order of the layout."""
        return {name: tensor[row] for name, tensor in self.tensors.items()}

    def leaves(self, rows: slice) -> Leaves:
        """Return views of the tensors of the given rows."""
        return {name: tensor[rows] for name, tensor in self.tensors.items()}


class Batch:
    """Rows of several stacks of one format that are updated or refreshed together.

    Args:
        parts: (stack, rows) in order. Adjacent rows of one larger stack need no copies. If orders
            differ, all matrices are padded to the largest.

    Attributes:
        replaced: bool (rows,): True if the last write replaced the row.
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
                before, span = stretches[-1]
                if before.whole is factors.whole and span.stop == start:
                    start = stretches.pop()[1].start
            stretches.append((factors, slice(start, stop)))
        # For each stretch: its tensors, its rows within the batch, and its order.
        self._slices: list[tuple[Leaves, slice, int]] = []
        first = 0
        for factors, rows in stretches:
            leaves = {name: tensor[rows] for name, tensor in factors.whole.items()}
            in_batch = slice(first, first + rows.stop - rows.start)
            self._slices.append((leaves, in_batch, factors.order))
            first = in_batch.stop

    def update(
        self,
        M: Tensor,
        finite: Tensor,
        config: Config,
        attempt: int = 0,
        chain: Chain | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run PU with a finite M, (rows, n, n), which may be overwritten; see ``Method.update``.

        A row is unchanged where ``finite``, bool (rows,), is False, or its factorisation fails.

        Returns:
            Two tensors, bool (rows,). The first is True if the factorisation can be trusted. The
            second is True if the statistic was replaced, because the new one is also finite.
        """
        new, good = self.method.update(self.restored(), M, config, attempt, chain)
        encode = self.method.encode
        return good, self._write(lambda rows, n: encode(new.part(rows, n)), finite & good)

    def refresh(self, config: Config) -> Tensor:
        """Run PIRU. Return bool (rows,), True if the new root is finite and replaced the old."""
        scale = self._trace_scale() if config.trace_scaling else None
        new = self.method.refresh(self.restored(), config)
        if scale is not None:
            new *= scale
        encode = self.method.root.encode
        all_rows = torch.ones(len(new), dtype=torch.bool, device=new.device)
        return self._write(lambda rows, n: encode(new[rows, :n, :n]), all_rows)

    def restored(self) -> Any:
        """D: return the statistic on the device, in the method's type, such as ``Triangle``."""
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
        """Return the ratio, a scalar, of (A / √tr A)^(-1/p) to A^(-1/p); 1 for a zero matrix."""
        trace = self.restored().trace()
        scale = torch.where(trace == 0, 1.0, trace)
        for _ in range(self.method.p.bit_length()):  # the 2p-th root; not pow, see ``Eigen``
            scale.sqrt_()
        return scale[:, None, None]

    def _write(self, encode: Callable[[slice, int], Leaves], accepted: Tensor) -> Tensor:
        """Replace accepted rows by new tensors where these are finite; return the replaced rows.

        All memory is allocated before anything is written, and a write that has begun runs to
        completion: codes and scales of a row always belong together.

        Args:
            encode: (rows, order) -> the new tensors of these rows.
            accepted: bool (rows,): False for rows that must not be replaced. It is overwritten by
                the result, bool (rows,): True for rows that were replaced.
        """
        replacements = [
            replacement(leaves, encode(rows, order), accepted[rows])
            for leaves, rows, order in self._slices
        ]

        def write() -> None:
            for replace in replacements:
                replace()
            self.replaced = accepted

        run_then(lambda: None, write)  # to completion, even if Ctrl-C arrives
        return accepted


def replacement(old: Mapping[str, Tensor], new: Leaves, accepted: Tensor) -> Callable[[], object]:
    """Return a function that overwrites old tensors, except in rows that are not finite.

    The function allocates nothing, and may be called again.

    Args:
        old: Tensors by name, perhaps in host memory; names that ``new`` lacks are unchanged.
        new: The new tensors, on the device.
        accepted: bool (rows,), contiguous: True for rows that are replaced. Once the function has
            been called, it is False for rows that are not finite.
    """
    targets, leaves = [old[name] for name in new], list(new.values())
    on_host = targets[0].device != accepted.device
    by = backend(accepted.device)
    if by.by_kernels and not on_host:
        leaves = [leaf.contiguous() for leaf in leaves]
    else:
        accepted &= _finite_rows(leaves)
    if not on_host:
        return partial(by.replace_rows_, targets, leaves, accepted)
    merged = [
        torch.where(_per_row(accepted, leaf), leaf, target.to(leaf.device, non_blocking=True))
        for target, leaf in zip(targets, leaves, strict=True)
    ]
    return partial(_copy_all, targets, merged)


def _copy_all(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for target, leaf in zip(old, new, strict=True):
        # Readers on the host must wait for the device first, as all updates do.
        target.copy_(leaf, non_blocking=True)


def _per_row(values: Tensor, leaf: Tensor) -> Tensor:
    """Add axes to values (rows,), so that they broadcast to a leaf."""
    return values.view(-1, *[1] * (leaf.dim() - 1))


def _finite_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Return bool (rows,), True if finite. A non-finite element has a non-finite scale."""
    checks = [
        torch.linalg.vector_norm(leaf.flatten(1), ord=torch.inf, dim=1) < torch.inf
        for leaf in leaves
        if leaf.is_floating_point()
    ]
    finite: Tensor = reduce(torch.logical_and, checks)
    return finite
