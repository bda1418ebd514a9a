"""The rows of a plan: peak memory of a training run for each way to store the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from kronbit.algorithms import KFAC, Shampoo
from kronbit.blocks.batches import NEWTON, PRECONDITION, UPDATE
from kronbit.config import EIGEN_OPTIONS, OPTIONS, Config, take_options
from kronbit.estimate import blockings, estimate_memory
from kronbit.lab.errors import LabError, lab_error
from kronbit.lab.optimizers import ALGORITHMS, BASE_LABELS, WAYS, Ways
from kronbit.lab.plan.networks import Network
from kronbit.optimizer import SecondOrder

_STORED = ("bits", "root_bits", "method", "storage", "block_size")
# GPU memory of a process outside torch's allocator: the CUDA context and loaded kernels.
CONTEXT = 512 * 2**20
_BATCHES = [2**i for i in range(21)]


@dataclass(frozen=True)
class Row:
    """Peak memory of a training run with one optimizer, in bytes.

    Activations are freed while gradients are allocated, and the optimizer runs when all activations
    are freed. So activations count only beyond the size of the gradients, and the workspace only
    beyond the size of the activations; the parts then add up to the total. K-FAC's sums over a
    batch are collected during the backward pass: they count in full, as part of the workspace.
    """

    key: str  # such as ``shampoo-4``
    label: str  # in tables
    parameters: int  # and buffers
    gradients: int
    base: int  # state of the first-order optimizer
    statistics: int = 0  # L and R on the GPU
    roots: int = 0
    activations: int = 0  # of both passes, beyond the gradients
    workspace: int = 0  # of updates, beyond the activations
    host: int = 0  # L and R that are offloaded
    fits: bool | None = None  # with ``CONTEXT``; None without a limit
    ratio: float | None = None  # 32-bit second-order state, divided by this one
    largest_batch: int | None = None  # power of two that fits; 0 if none does

    @property
    def second_order(self) -> int:
        """Bytes of statistics and roots, on the GPU and on the host."""
        return self.statistics + self.roots + self.host

    @property
    def parts(self) -> dict[str, int]:
        """Bytes on the GPU by kind."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "base": self.base,
            "second order": self.statistics + self.roots,
            "activations": self.activations,
            "workspace": self.workspace,
        }

    @property
    def total(self) -> int:
        """All bytes on the GPU."""
        return sum(self.parts.values())


@dataclass
class Accounts:
    """Computes the rows of one network."""

    network: Network
    model: nn.Module  # on the meta device
    settings: Mapping[str, Any]  # options of kronbit's optimizers or of the base
    limit: int | None  # memory of the GPU in bytes
    peak_at: Callable[[int], int] | None  # batch size -> peak of both passes in bytes, if known
    notes: list[str] = field(default_factory=list)  # rows that were left out, and why

    def __post_init__(self) -> None:
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._gradients = sum(p.nbytes for p in self._trained)
        options = {k: v for k, v in self.settings.items() if k not in OPTIONS}
        options = {"base": self.network.base, **self.network.base_options, **options}
        self._base = Row(
            "base",
            BASE_LABELS.get(self.network.base, self.network.base),
            parameters=sum(x.nbytes for x in (*self.model.parameters(), *self.model.buffers())),
            gradients=self._gradients,
            base=self._estimated(Shampoo, options)["base"],
            activations=self._beyond_gradients(self.network.batch or 0),
        )

    def rows(self, algorithm: str, order: int | None) -> list[Row]:
        """Return the row of the base alone, then one row per way to store an algorithm's state.

        Shampoo's rows are followed by K-FAC's. ``order`` is ``max_order`` of the algorithm.
        """
        options = self._options(algorithm) | ({} if order is None else {"max_order": order})
        stored = {key: options[key] for key in _STORED if key in options}
        label = ", ".join(f"{key}={value}" for key, value in stored.items())
        ways = {**WAYS, "set": (f"{{}}, {label}", stored)} if stored else WAYS
        rows = [self._fitted(self._base), *self._rows_of(algorithm, options, ways)]
        if algorithm == "shampoo":
            try:
                # AdaBK has the state of K-FAC. Both keep layers whole: ``order`` does not apply.
                ways = {key: (f"{key}-bit {{}} or AdaBK", WAYS[key][1]) for key in ("32", "4")}
                rows += self._rows_of("kfac", self._options("kfac"), ways)
            except LabError as error:
                self.notes.append(f"K-FAC and AdaBK are left out: {error}")
        return rows

    def _options(self, algorithm: str) -> dict[str, Any]:
        source = self.network.kfac if algorithm in ("kfac", "adabk") else self.network.shampoo
        return {k: v for k, v in {**source, **self.settings}.items() if k in OPTIONS}

    def _rows_of(self, algorithm: str, options: Mapping[str, Any], ways: Ways) -> list[Row]:
        kind, name = ALGORITHMS[algorithm]
        # Storage options differ by row; options of the eigenvector updates take no memory.
        shared = {k: v for k, v in options.items() if k not in (*_STORED, *EIGEN_OPTIONS)}
        whole = self._estimated(kind, {**shared, "bits": 32})
        if not whole["total"]:
            raise LabError(f"{name} finds nothing to precondition in {self.network.name}")
        # Y Yᵀ and X Xᵀ of all layers in float32
        collected = whole["statistics"] if issubclass(kind, KFAC) else 0
        rows = []
        for key, (label, way) in ways.items():
            given = {**shared, **way}
            held = self._estimated(kind, given)
            config = take_options(given, kind.algorithm.options)
            offloaded = held["statistics"] if config.offload_statistics else 0
            workspace = max(int(config.workspace_mb * 2**20), self._largest_block(kind, config))
            workspace += config.keep_gradients * self._gradients
            row = replace(
                self._base,
                key=f"{algorithm}-{key}",
                label=f"+ {label.format(name)}",
                statistics=held["statistics"] - offloaded,
                roots=held["roots"],
                workspace=collected + max(0, workspace - self._base.activations),
                host=offloaded,
                ratio=whole["total"] / held["total"],
            )
            rows.append(self._fitted(row, workspace))
        return rows

    def _estimated(self, kind: type[SecondOrder], options: Mapping[str, Any]) -> dict[str, int]:
        with lab_error("", TypeError, ValueError, ImportError):
            return estimate_memory(self.model, optimizer=kind, **{"base": None, **options})

    def _largest_block(self, kind: type[SecondOrder], config: Config) -> int:
        """Return the bytes that the largest block needs, which may exceed ``workspace_mb``."""
        by_newton = config.format(1).method in ("dense", "naive") or config.root == "schur_newton"
        copied = (config.bits == 32) + config.offload_statistics
        elements = [
            (cost.square + copied) * max(m, n) ** 2 + cost.block * m * n
            for blocking in blockings(kind, self._trained, config, self.model)
            for m, n in {grid.shape for grid in blocking.grids}
            for cost in (UPDATE, PRECONDITION, *([NEWTON] if by_newton else []))
        ]
        return 4 * max(elements, default=0)

    def _fitted(self, row: Row, workspace: int = 0) -> Row:
        """Add ``fits`` and ``largest_batch``. ``workspace`` is used after activations are freed."""
        if self.limit is None:
            return row
        room = self.limit - CONTEXT - row.total + max(row.activations, workspace)

        def fits(batch: int) -> bool:
            return max(self._beyond_gradients(batch), workspace) <= room

        largest = None if self.peak_at is None else max(filter(fits, _BATCHES), default=0)
        return replace(row, fits=fits(self.network.batch or 0), largest_batch=largest)

    def _beyond_gradients(self, batch: int) -> int:
        return 0 if self.peak_at is None else max(0, self.peak_at(batch) - self._gradients)
