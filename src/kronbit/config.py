"""The options of the second-order optimizers, and their checks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from kronbit.quantization.quantizer import BITS, Quantizer

METHODS = ("dense", "eigen", "naive", "cholesky")
STORAGES = ("paper", "compact")
EXPONENTS = (-0.25, -0.5, -1.0)

# Version of the state's layout, stored in every param group.
FORMAT = 2
FORMAT_KEY = "kronbit_format"
# Kind of statistics; checkpoints of another kind cannot be loaded.
STATISTICS_KEY = "kronbit_statistics"


class Format(NamedTuple):
    """Storage format of the factors of one order. Equal formats have interchangeable tensors."""

    method: str
    statistic: Quantizer
    root: Quantizer
    compact: bool = False
    p: int = 4  # the root is the inverse p-th root of the statistic

    @property
    def root_part(self) -> tuple[Quantizer, bool, int]:
        """The fields that determine the root's tensors."""
        return self.root, self.compact, self.p

    @property
    def statistic_part(self) -> tuple[str, Quantizer, bool]:
        """The fields that determine the statistic's tensors."""
        return self.method, self.statistic, self.compact


_FLOAT32 = Quantizer(bits=32)


@dataclass(frozen=True)
class Config:
    """Options of a second-order optimizer.

    A description starts with the paper's symbol, if there is one. F is the base optimizer, L and R
    are the statistics of a block, L̂ and R̂ their inverse roots, and G̃ is the preconditioned
    gradient. All options but the last seven can also be set per param group.

    Attributes:
        bits: b. Width of the stored statistics: 3, 4, 6, 8 or 32.
        root_bits: Width of the stored inverse roots. ``None``: the same as ``bits``.
        method: Representation of the statistics. ``"cholesky"`` quantises the Cholesky factor.
            ``"eigen"``, the paper's method, stores eigenvalues and quantised eigenvectors.
            ``"naive"``, the paper's baseline, quantises the matrix itself. ``"dense"`` keeps
            float32. ``None``: ``"dense"`` at 32 bits, else ``"cholesky"``.
        mapping: Codebook of the quantiser: ``"linear2"``, ``"dt"`` or ``"linear"``.
        block_size: Number of elements that share one scale.
        min_quantized_numel: Statistics and roots with fewer elements stay in 32 bits.
        storage: Layout of quantised matrices. ``"compact"`` stores one triangle of symmetric and
            triangular matrices, in tiles, with 8-bit scales. ``"paper"`` is the paper's layout,
            bit for bit. ``None``: ``"compact"`` if ``block_size`` is 64, else ``"paper"``.
        exponent: Exponent of the inverse root: -1/4 (the paper's), -1/2 or -1.
        trace_scaling: If True, L and R are divided by the square root of their trace before the
            root is computed. This changes the balance between the blocks of a parameter, but not
            the norm of G̃, which is the norm of the gradient.
        beta: β. Decay of the statistics. 1: a plain sum.
        damping: ε. Ridge of the root, relative to the largest eigenvalue. ``"cholesky"`` uses at
            least 5e-7. (``eps`` is an option of the base optimizer.)
        start: Initial statistics: L0 = R0 = start I. ``None``: ε I, as in the paper's Shampoo.
        update_every: T1. Steps between updates of the statistics.
        refresh_every: T2. Steps between refreshes of the inverse roots.
        first_refresh: An integer k below T2. Before step T2, updates and refreshes run at steps k,
            2k, 4k, ...; from then on, every T1 and T2 steps. ``None``: the first refresh is at T2.
        stagger: If True, updates and refreshes are spread over their intervals. Each block keeps
            the schedule, with a delay below the longer interval, and R follows two steps after L.
            If False, all blocks are due at the same step, as in the paper.
        update_rectify: t1. Björck steps on the dequantised eigenvectors before an update. Only for
            ``"eigen"``.
        refresh_rectify: t2. Björck steps before a refresh. Only for ``"eigen"``.
        qr_iterations: QR iterations of the randomized SVD in each update. Only for ``"eigen"``.
        root: How ``method="eigen"`` computes the root: ``"eigen"`` takes powers of the eigenvalues,
            ``"schur_newton"`` iterates on the matrix, as ``method="dense"`` does.
        newton_steps: Schur-Newton iterations. The paper's 10 do not converge at high condition
            numbers, which acts like a damping of 1e-5 to 1e-4.
        max_order: Largest side of a block. Larger matrices are cut.
        split: Sizes of the pieces of a cut side. ``"greedy"``, the paper's: max_order, max_order,
            ..., remainder. ``"even"``: equal pieces, rounded up to multiples of 64.
        batch_dims: Number of leading axes that index matrices: 1 for stacked experts (E, m, n).
        split_sizes: Row counts of matrices stacked in one parameter, such as a fused QKV. Each
            matrix is cut separately. Sizes that add up to the number of columns split the columns.
        precondition: If False, the parameters are left to the base optimizer.
        workspace_mb: Limit on transient memory, in MiB. A single large block may exceed it.
        offload_statistics: If True, the statistics of parameters on a GPU are kept in pinned host
            memory and copied to the GPU for updates and refreshes. The inverse roots stay on the
            GPU, since every step needs them.
        shard_state: If True, ranks that hold the same parameters (DistributedDataParallel) divide
            the state: one rank keeps the state of a parameter and sends its G̃ to the others at
            every step. Use ``kronbit.consolidate_state_dict`` instead of ``state_dict()``.
        blocks: Blocks of parameters whose rows are sharded over ranks (FSDP2). ``"whole"`` cuts the
            whole matrix, as in one process. ``"local"`` cuts each rank's rows and needs no
            communication, but the blocks depend on the number of ranks.
        keep_gradients: If True, gradients are unchanged after the step, which works on a copy.
        cuda_graph: If True, the ordinary step on a GPU and the factorisation of updates are
            captured as CUDA graphs.
        nonfinite: Treatment of a parameter's non-finite gradient. ``"zero"`` sets it to zero,
            ``"pass"`` passes it to the base optimizer, and ``"raise"`` raises an error. With
            ``"raise"``, every step waits for the device.
    """

    # Up to ``exponent``: FORMAT_OPTIONS.
    bits: int = 4
    root_bits: int | None = None
    method: str | None = None
    mapping: str = "linear2"
    block_size: int = 64
    min_quantized_numel: int = 4096
    storage: str | None = None
    exponent: float = -0.25
    trace_scaling: bool = False
    beta: float = 0.95
    damping: float = 1e-6
    start: float | None = None
    update_every: int = 100
    refresh_every: int = 500
    first_refresh: int | None = None
    stagger: bool = False
    update_rectify: int = 1
    refresh_rectify: int = 4
    qr_iterations: int = 1
    root: str = "eigen"
    newton_steps: int = 10
    max_order: int = 1200
    split: str = "greedy"
    batch_dims: int = 0
    split_sizes: tuple[int, ...] | None = None
    precondition: bool = True
    # From here on: GLOBAL_OPTIONS.
    workspace_mb: float = 256
    offload_statistics: bool = False
    shard_state: bool = False
    blocks: str = "whole"
    keep_gradients: bool = False
    cuda_graph: bool = True
    nonfinite: str = "zero"

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(field.default, bool):
                _choice(name, value, (True, False))
            elif name in _CHOICES:
                _choice(name, value, _CHOICES[name])
            elif name in _LEAST:
                _integer(name, value, _LEAST[name])
            elif name in _INTERVALS:
                _number(name, value, *_INTERVALS[name])
        Quantizer(self.bits, self.mapping, self.block_size)
        if self.exponent not in EXPONENTS:
            raise ValueError(f"exponent must be one of {EXPONENTS}; got {self.exponent!r}")
        sizes = self.split_sizes
        if sizes is not None:
            # Accept any sequence, such as OmegaConf's ListConfig.
            if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
                raise TypeError(f"split_sizes must be a tuple of positive integers; got {sizes!r}")
            for i, size in enumerate(sizes):
                _integer(f"split_sizes[{i}]", size, 1)
            object.__setattr__(self, "split_sizes", tuple(sizes))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.method == "dense" and (self.bits, self.root_bits or 32) != (32, 32):
            raise ValueError(
                f"method='dense' keeps 32 bits, but bits={self.bits}, root_bits={self.root_bits}: "
                "set bits=32, or method='eigen', 'naive' or 'cholesky'"
            )
        if self.method == "naive" and self.bits == 32:
            raise ValueError("method='naive' with bits=32 is method='dense': set method='dense'")
        if self.method is None and self.bits == 32 and self.root_bits not in (None, 32):
            raise ValueError(
                f"bits=32 with root_bits={self.root_bits} needs method='eigen' or 'cholesky': "
                "'dense', the default at 32 bits, keeps float32 roots"
            )
        if self.storage == "compact" and self.block_size != 64:
            raise ValueError(
                f"storage='compact' needs block_size=64, the side of its tiles; got "
                f"{self.block_size}: leave out block_size, or set storage='paper'"
            )
        if self.first_refresh is not None and self.first_refresh >= self.refresh_every:
            raise ValueError(
                f"first_refresh must be below refresh_every={self.refresh_every} to bring the "
                f"first refresh forward; got {self.first_refresh}"
            )

    def for_group(self, group: Mapping[str, Any]) -> Config:
        """Return these options, overridden by those of a param group."""
        forbidden = sorted(GLOBAL_OPTIONS & group.keys())
        if forbidden:
            raise ValueError(
                f"{forbidden[0]} applies to the whole optimizer and cannot be set in a group: "
                "pass it to the constructor"
            )
        return replace(self, **{name: group[name] for name in GROUP_OPTIONS if name in group})

    def format(self, order: int) -> Format:
        """Return the storage format of factors of this order. Small factors stay in 32 bits."""
        method = self.method or ("dense" if self.bits == 32 else "cholesky")
        p = round(-1 / self.exponent)
        if order * order < self.min_quantized_numel:
            return Format("dense" if method == "naive" else method, _FLOAT32, _FLOAT32, p=p)
        statistic, root = self._quantizer(self.bits), self._quantizer(self.root_bits)
        # Compact storage removes redundancy of quantised tensors; at 32 bits there is none.
        storage = self.storage or ("compact" if self.block_size == 64 else "paper")
        compact = storage == "compact" and not statistic.bits == root.bits == 32
        return Format(method, statistic, root, compact, p)

    def _quantizer(self, bits: int | None) -> Quantizer:
        bits = self.bits if bits is None else bits
        return _FLOAT32 if bits == 32 else Quantizer(bits, self.mapping, self.block_size)

    @property
    def start_value(self) -> float:
        """Initial value of the statistics' diagonals."""
        return self.damping if self.start is None else self.start


def take_options(
    keywords: MutableMapping[str, Any], defaults: Iterable[tuple[str, Any]] = ()
) -> Config:
    """Take the second-order options out of an optimizer's keywords and leave the options of F.

    ``defaults`` are an algorithm's defaults, which override those of ``Config``.
    """
    given = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
    config = Config(**{**dict(defaults), **given})
    if config.method is None and config.bits < 32:
        plain = Config(**dict(defaults))
        for name in EIGEN_OPTIONS:
            if getattr(config, name) != getattr(plain, name):
                raise ValueError(
                    f"{name}={given[name]!r} is for method='eigen', which is not the default: "
                    f"set method='eigen', or leave out {name}"
                )
    return config


# Options with a few allowed values. The quantiser checks ``mapping`` and ``block_size``.
_CHOICES: dict[str, tuple[object, ...]] = {
    "bits": BITS,
    "root_bits": BITS,
    "method": METHODS,
    "storage": STORAGES,
    "root": ("eigen", "schur_newton"),
    "split": ("greedy", "even"),
    "blocks": ("whole", "local"),
    "nonfinite": ("zero", "pass", "raise"),
}
_LEAST = {"min_quantized_numel": 0, "update_rectify": 0, "refresh_rectify": 0, "batch_dims": 0}
_LEAST |= dict.fromkeys(("update_every", "refresh_every", "first_refresh", "qr_iterations"), 1)
_LEAST |= {"newton_steps": 1, "max_order": 1}
_INTERVALS: dict[str, tuple[float, float]] = {"exponent": (-1, 0), "beta": (0, 1)}
_INTERVALS |= dict.fromkeys(("damping", "start", "workspace_mb"), (0, math.inf))

OPTIONS = tuple(field.name for field in fields(Config))
_first_global = OPTIONS.index("workspace_mb")
GROUP_OPTIONS, GLOBAL_OPTIONS = OPTIONS[:_first_global], frozenset(OPTIONS[_first_global:])
# Options that only ``method="eigen"`` uses.
EIGEN_OPTIONS = ("update_rectify", "refresh_rectify", "qr_iterations", "root")
# Options of matrix storage. Fixed once state exists, but checkpoints are converted.
FORMAT_OPTIONS = OPTIONS[: OPTIONS.index("exponent") + 1]
# Options of the cut into blocks. Fixed once state exists, and checkpoints must agree.
CUT_OPTIONS = ("max_order", "split", "batch_dims", "split_sizes", "precondition")
STRUCTURAL_OPTIONS = FORMAT_OPTIONS + CUT_OPTIONS


def _choice(name: str, value: object, allowed: Collection[object]) -> None:
    # Compare types, too: 4.0 == 4 and True == 1, but neither is a bit width.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer >= {least}; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}; got {value!r}")


def _number(name: str, value: object, least: float, most: float) -> None:
    allowed = f"a number in [{least}, {most}]" if most < math.inf else f"a finite number >= {least}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}; got {value!r}")
    if not (least <= value <= most and math.isfinite(value)):
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
