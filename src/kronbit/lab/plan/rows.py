"""The rows of a plan: peak memory of a training for each way to store the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from kronbit.algorithms import KFAC, Shampoo
from kronbit.blocks.batches import NEWTON, PRECONDITION, UPDATE
from kronbit.blocks.blocking import Blocking
from kronbit.config import EIGEN_OPTIONS, OPTIONS, Config, take_options
from kronbit.estimate import estimate_memory
from kronbit.lab.errors import LabError, one_line
from kronbit.lab.optimizers import ALGORITHMS, BASE_LABELS
from kronbit.lab.plan.networks import Network
from kronbit.optimizer import SecondOrder
from kronbit.statistics import GradientStatistics
from kronbit.statistics.activations import ActivationStatistics

_EIGEN, _PAPER = {"method": "eigen"}, {"method": "eigen", "storage": "paper"}
_Ways: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]  # key -> (label, options)
WAYS: _Ways = {
    "32": ("32-bit {}", {"bits": 32}),
    "4-naive": ("4-bit {} (naive)", {"bits": 4, "method": "naive", "storage": "paper"}),
    "4-paper": ("4-bit {} (paper)", {"bits": 4, **_PAPER}),
    "4-eigen": ("4-bit {} (eigen)", {"bits": 4, **_EIGEN}),
    "3": ("3-bit {}", {"bits": 3}),
    "4": ("4-bit {} (default)", {"bits": 4}),
    "6+4": ("6-bit {}, roots 4", {"bits": 6, "root_bits": 4}),
    "8": ("8-bit {}", {"bits": 8}),
    "8-paper": ("8-bit {} (paper)", {"bits": 8, **_PAPER}),
}
_STORED = ("bits", "root_bits", "method", "storage", "block_size")
# GPU memory of a process outside torch's allocator: the CUDA context and loaded kernels.
CONTEXT = 512 * 2**20
_LARGEST_BATCH = 2**20


@dataclass(frozen=True)
class Row:
    """Peak memory of a training with one optimizer, in bytes.

    Activations are freed while gradients are allocated, and the optimizer runs when all activations
    are freed. So activations count only beyond the size of the gradients, and the workspace only
    beyond the size of the activations; the parts then add up to the total.

    Attributes:
        key: Name of the row, such as ``shampoo-4``.
        label: Name of the row in tables.
        parameters: Parameters and buffers.
        gradients: Gradients of all parameters.
        base: State of the first-order optimizer.
        statistics: L and R on the GPU.
        roots: Inverse roots of L and R.
        activations: Memory of both passes beyond the gradients.
        workspace: Memory of updates beyond the activations. K-FAC's sums over a batch are collected
            during the backward pass, so they count in full.
        host: L and R that are offloaded to the host.
        fits: True if the total and ``CONTEXT`` fit; ``None`` without a limit.
        ratio: Size of the 32-bit second-order state divided by the size of this one.
        largest_batch: The largest power of two that fits; 0 if none does.
    """

    key: str
    label: str
    parameters: int
    gradients: int
    base: int
    statistics: int
    roots: int
    activations: int
    workspace: int
    host: int
    fits: bool | None
    ratio: float | None
    largest_batch: int | None

    @property
    def second_order(self) -> int:
        """Bytes of statistics and roots, on the GPU and on the host."""
        return self.statistics + self.roots + self.host

    @property
    def total(self) -> int:
        """All bytes on the GPU."""
        state = self.base + self.statistics + self.roots
        return self.parameters + self.gradients + state + self.activations + self.workspace


@dataclass(frozen=True)
class _SecondOrder:
    """Bytes that an optimizer allocates besides the base's state."""

    statistics: int = 0
    roots: int = 0
    host: int = 0
    collected: int = 0
    workspace: int = 0


class Accounts:
    """Computes the rows of one network.

    Args:
        network: The network, with the training settings of its source.
        model: The network on the meta device.
        settings: Options of kronbit's optimizers or of the base.
        limit: Memory of the GPU in bytes; ``None`` for no limit.
        peak_at: Maps a batch size to the peak of both passes in bytes; ``None`` if unknown.

    Attributes:
        notes: Rows that were left out, and why.

    Raises:
        LabError: If the base is unknown, or its memory cannot be estimated.
    """

    def __init__(
        self,
        network: Network,
        model: nn.Module,
        settings: Mapping[str, Any],
        limit: int | None,
        peak_at: Callable[[int], int] | None,
    ) -> None:
        self._network, self._model, self._limit, self._peak_at = network, model, limit, peak_at
        self._settings = {key: value for key, value in settings.items() if key in OPTIONS}
        others = {key: value for key, value in settings.items() if key not in OPTIONS}
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._parameters = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        self._gradients = sum(p.nbytes for p in self._trained)
        options = {**network.base_options, **others}
        self._base = _estimated(model, Shampoo, network.base, options)["base"]
        self.notes: list[str] = []

    def rows(self, algorithm: str, order: int | None) -> list[Row]:
        """Return the row of the base alone, then one row per way to store an algorithm's state.

        Args:
            algorithm: A key of ``ALGORITHMS``; Shampoo's rows are followed by K-FAC's.
            order: ``max_order`` of the algorithm.

        Raises:
            LabError: If an option is wrong.
        """
        options = self._options(algorithm, order)
        stored = {key: options[key] for key in _STORED if key in options}
        ways = WAYS
        if stored:
            label = ", ".join(f"{key}={value}" for key, value in stored.items())
            ways = {**WAYS, "set": (f"{{}}, {label}", stored)}
        base = self._row("base", BASE_LABELS.get(self._network.base, self._network.base))
        rows = [base, *self._rows_of(algorithm, options, ways)]
        if algorithm == "shampoo":
            try:
                # AdaBK has the state of K-FAC. Both keep layers whole: ``order`` does not apply.
                ways = {key: (f"{key}-bit {{}} or AdaBK", WAYS[key][1]) for key in ("32", "4")}
                rows += self._rows_of("kfac", self._options("kfac", None), ways)
            except LabError as error:
                self.notes.append(f"K-FAC and AdaBK are left out: {error}")
        return rows

    def _options(self, algorithm: str, order: int | None) -> dict[str, Any]:
        of_layers = algorithm in ("kfac", "adabk")
        source = self._network.kfac if of_layers else self._network.shampoo
        options = {key: value for key, value in source.items() if key in OPTIONS} | self._settings
        return options if order is None else {**options, "max_order": order}

    def _rows_of(self, algorithm: str, options: Mapping[str, Any], ways: _Ways) -> list[Row]:
        kind, name = ALGORITHMS[algorithm]
        # Storage options differ by row; options of the eigenvector updates take no memory.
        shared = {k: v for k, v in options.items() if k not in (*_STORED, *EIGEN_OPTIONS)}
        whole = self._second_order(kind, {**shared, "bits": 32})
        size = whole.statistics + whole.roots + whole.host
        if not size:
            raise LabError(f"{name} finds nothing to precondition in {self._network.name}")
        rows = []
        for key, (label, way) in ways.items():
            held = self._second_order(kind, {**shared, **way})
            rows.append(self._row(f"{algorithm}-{key}", f"+ {label.format(name)}", held, size))
        return rows

    def _second_order(self, kind: type[SecondOrder], options: Mapping[str, Any]) -> _SecondOrder:
        held = _estimated(self._model, kind, None, options)
        config = take_options(dict(options), kind.algorithm.options)
        statistics, host = held["statistics"], 0
        if config.offload_statistics:
            statistics, host = 0, statistics
        workspace = max(int(config.workspace_mb * 2**20), self._largest_block(kind, config))
        if config.keep_gradients:
            workspace += self._gradients
        collected = 0
        if issubclass(kind, KFAC):  # Y Yᵀ and X Xᵀ of all layers in float32
            plain = {k: v for k, v in options.items() if k not in _STORED}
            collected = _estimated(self._model, kind, None, {**plain, "bits": 32})["statistics"]
        return _SecondOrder(statistics, held["roots"], host, collected, workspace)

    def _largest_block(self, kind: type[SecondOrder], config: Config) -> int:
        """Return the bytes that the largest block needs, which may exceed ``workspace_mb``."""
        route: Callable[[Tensor, Config], Blocking | str] = GradientStatistics().route
        if issubclass(kind, KFAC):
            statistics = ActivationStatistics(self._model)
            statistics.adopt(self._trained)
            route = statistics.route
        blockings = [route(p, config) for p in self._trained]
        shapes = {
            grid.shape for cut in blockings if isinstance(cut, Blocking) for grid in cut.grids
        }
        method = config.method or ("dense" if config.bits == 32 else "cholesky")
        by_newton = method in ("dense", "naive") or config.root == "schur_newton"
        copied = (config.bits == 32) + config.offload_statistics
        elements = [
            (cost.square + copied) * max(m, n) ** 2 + cost.block * m * n
            for cost in (UPDATE, PRECONDITION, *([NEWTON] if by_newton else []))
            for m, n in shapes
        ]
        return 4 * max(elements, default=0)

    def _row(self, key: str, label: str, held: _SecondOrder | None = None, whole: int = 0) -> Row:
        """Return a row.

        Args:
            key: Name of the row.
            label: Name of the row in tables.
            held: Memory of the optimizer besides the base's state.
            whole: Bytes of the second-order state in 32 bits.
        """
        held = held or _SecondOrder()
        state = held.statistics + held.roots
        kept = self._parameters + self._gradients + self._base + state + held.collected
        activations = self._needed_beyond_gradients(self._network.batch or 0)
        fits = largest = None
        if self._limit is not None:
            room = self._limit - CONTEXT - kept
            fits = max(activations, held.workspace) <= room
            if self._peak_at is not None:
                batches = (2**i for i in range(_LARGEST_BATCH.bit_length()))
                needs = (
                    (max(self._needed_beyond_gradients(b), held.workspace), b) for b in batches
                )
                largest = max((b for need, b in needs if need <= room), default=0)
        return Row(
            key=key,
            label=label,
            parameters=self._parameters,
            gradients=self._gradients,
            base=self._base,
            statistics=held.statistics,
            roots=held.roots,
            activations=activations,
            workspace=held.collected + max(0, held.workspace - activations),
            host=held.host,
            fits=fits,
            ratio=whole / (state + held.host) if state + held.host else None,
            largest_batch=largest,
        )

    def _needed_beyond_gradients(self, batch: int) -> int:
        return 0 if self._peak_at is None else max(0, self._peak_at(batch) - self._gradients)


def _estimated(
    model: nn.Module, kind: type[SecondOrder], base: str | None, options: Mapping[str, Any]
) -> dict[str, int]:
    try:
        return estimate_memory(model, optimizer=kind, base=base, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise LabError(one_line(error)) from error
