"""The options: one frozen dataclass, every bad value refused here by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any, NamedTuple

from kronbit.quantization.quantizer import BITS, Quantizer

METHODS = ("dense", "eigen", "naive", "cholesky")
STORAGES = ("paper", "compact")
EXPONENTS = (-0.25, -0.5, -1.0)

# Version of the state's layout, kept in every param group.
FORMAT = 2
FORMAT_KEY = "kronbit_format"
# What the statistics are made of, there, too: those of others are of no use.
STATISTICS_KEY = "kronbit_statistics"


class Format(NamedTuple):
    """How the factors of one order are stored. Equal formats hold interchangeable tensors."""

    method: str
    statistic: Quantizer
    root: Quantizer
    compact: bool = False
    p: int = 4

    @property
    def root_part(self) -> tuple[Quantizer, bool, int]:
        """What the root's tensors depend on."""
        return self.root, self.compact, self.p

    @property
    def statistic_part(self) -> tuple[str, Quantizer, bool]:
        """What the statistic's tensors depend on."""
        return self.method, self.statistic, self.compact


_FLOAT32 = Quantizer(bits=32)


@dataclass(frozen=True)
class Config:
    """Options of a second-order optimizer; the paper's symbol stands first where it has one.

    All but the last seven may also be given per param group.

    Attributes:
        bits: b. Width of the stored statistics: 3, 4, 6, 8 or 32.
        root_bits: Width of the stored inverse roots; ``None``: the same as ``bits``.
        method: ``"cholesky"`` quantises the preconditioner's triangular factor, ``"eigen"`` stores
            eigenvalues and quantised eigenvectors (the paper's method), ``"naive"`` quantises the
            preconditioner itself (its baseline), ``"dense"`` keeps float32. ``None``: ``"dense"``
            at 32 bits, else ``"cholesky"``.
        mapping: R. ``"linear2"``, ``"dt"`` or ``"linear"``.
        block_size: Elements that share one scale.
        min_quantized_numel: A matrix with fewer elements stays in 32 bits.
        storage: ``"compact"``: of symmetric and triangular matrices one triangle, in tiles, and
            scales quantised to 8 bits. ``"paper"``: the paper's layout, to the bit. ``None``:
            ``"compact"``, unless ``block_size`` is not 64.
        exponent: The power of L and R that L̂ and R̂ are: -1/4, the paper's, -1/2 or -1.
        trace_scaling: True divides L and R by the root of their trace before they are raised to
            ``exponent``. The norm of a parameter's update is F's in any case; this is about the
            balance between its blocks.
        beta: β. Decay of the statistics; 1 sums them up.
        damping: ε. Ridge of the root relative to the largest eigenvalue; of ``"cholesky"`` at least
            5e-7. (Not ``eps``, which belongs to the base optimizer.)
        start: L0 = R0 = start I; ``None``: ε I, the paper's for Shampoo.
        update_every: T1. Steps between updates of the statistics.
        refresh_every: T2. Steps between refreshes of the inverse roots.
        first_refresh: ``None``: the first refresh is at T2. An integer k: update and refresh at
            k, 2k, 4k, ... while below T2; from T2 on, T1 and T2 rule.
        stagger: True spreads updates and refreshes over their intervals: the blocks run the same
            schedule, each with a delay of its own below the longer interval (R two steps more than
            L), so that no step does the work of all. False: all at the same step, as in the paper.
        update_rectify: t1. Björck steps on the dequantised eigenvectors before an update; this and
            the next three are for ``"eigen"``.
        refresh_rectify: t2. Björck steps before a refresh.
        qr_iterations: QR iterations of the randomized SVD in each update.
        root: How ``"eigen"`` takes the root: ``"eigen"``, by powers of the eigenvalues, or
            ``"schur_newton"``, as the dense method does.
        newton_steps: Schur-Newton iterations. Ten, the paper's number, do not converge at high
            condition: they act like a damping of 1e-5 to 1e-4.
        max_order: Largest side of a block; larger matrices are cut.
        split: ``"greedy"``: max_order, max_order, ..., remainder (the paper's); ``"even"``: equal
            pieces, rounded up to multiples of 64.
        batch_dims: Leading axes that count matrices: 1 for stacked experts (E, m, n).
        split_sizes: Rows of matrices stacked in one parameter, such as a fused QKV; each is cut
            on its own. Where the rows do not sum up but the columns do, the columns are split.
        precondition: False leaves the parameters to the base optimizer.
        workspace_mb: Bound of transient memory, in MiB.
        offload_statistics: True keeps the statistics of parameters on a GPU in the host's memory
            (pinned); updates and refreshes stream them through the workspace. The inverse roots,
            which every step needs, stay on the GPU.
        shard_state: True, where ranks hold the same parameters (DistributedDataParallel): the state
            of each parameter is on one of them, which sends its G̃ to the others at every step.
            Least memory; ``kronbit.consolidate_state_dict`` takes the place of ``state_dict()``.
        blocks: Of parameters whose rows are sharded over ranks (FSDP2). ``"whole"``: those of the
            whole matrix, as in one process. ``"local"``: each rank cuts its own rows, and sends
            nothing; another cut, which depends on the number of ranks.
        keep_gradients: True gives the gradients back unchanged after the step, at the price of a
            copy of them.
        cuda_graph: Whether the ordinary step on a GPU, and the factorisation inside of updates, are
            captured as CUDA graphs.
        nonfinite: What becomes of a parameter's non-finite gradient: ``"zero"``, ``"pass"`` (the
            base optimizer sees it) or ``"raise"`` (waits for the device at every step).
    """

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
    workspace_mb: float = 256
    offload_statistics: bool = False
    shard_state: bool = False
    blocks: str = "whole"
    keep_gradients: bool = False
    cuda_graph: bool = True
    nonfinite: str = "zero"

    def __post_init__(self) -> None:
        _choice("bits", self.bits, BITS)
        if self.root_bits is not None:
            _choice("root_bits", self.root_bits, BITS)
        if self.method is not None:
            _choice("method", self.method, METHODS)
        Quantizer(self.bits, self.mapping, self.block_size)
        _integer("min_quantized_numel", self.min_quantized_numel, 0)
        if self.storage is not None:
            _choice("storage", self.storage, STORAGES)
        _number("exponent", self.exponent, -1, 0)
        if self.exponent not in EXPONENTS:
            raise ValueError(f"exponent must be one of {EXPONENTS}; got {self.exponent!r}")
        _choice("trace_scaling", self.trace_scaling, (True, False))
        _number("beta", self.beta, 0, 1)
        _number("damping", self.damping, 0, math.inf)
        if self.start is not None:
            _number("start", self.start, 0, math.inf)
        _integer("update_every", self.update_every, 1)
        _integer("refresh_every", self.refresh_every, 1)
        if self.first_refresh is not None:
            _integer("first_refresh", self.first_refresh, 1)
        _choice("stagger", self.stagger, (True, False))
        _integer("update_rectify", self.update_rectify, 0)
        _integer("refresh_rectify", self.refresh_rectify, 0)
        _integer("qr_iterations", self.qr_iterations, 1)
        _choice("root", self.root, ("eigen", "schur_newton"))
        _integer("newton_steps", self.newton_steps, 1)
        _integer("max_order", self.max_order, 1)
        _choice("split", self.split, ("greedy", "even"))
        _integer("batch_dims", self.batch_dims, 0)
        if self.split_sizes is not None:
            if not _is_sequence(self.split_sizes) or not self.split_sizes:
                raise TypeError(
                    f"split_sizes must be a tuple of positive integers; got {self.split_sizes!r}"
                )
            for size in self.split_sizes:
                _integer("each of split_sizes", size, 1)
            object.__setattr__(self, "split_sizes", tuple(self.split_sizes))
        _choice("precondition", self.precondition, (True, False))
        _number("workspace_mb", self.workspace_mb, 0, math.inf)
        _choice("offload_statistics", self.offload_statistics, (True, False))
        _choice("shard_state", self.shard_state, (True, False))
        _choice("blocks", self.blocks, ("whole", "local"))
        _choice("keep_gradients", self.keep_gradients, (True, False))
        _choice("cuda_graph", self.cuda_graph, (True, False))
        _choice("nonfinite", self.nonfinite, ("zero", "pass", "raise"))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.method == "dense" and (self.bits, self.root_bits or 32) != (32, 32):
            raise ValueError(
                f"method='dense' keeps 32 bits, but bits={self.bits}, root_bits={self.root_bits}: "
                "give bits=32, or method='eigen', 'naive' or 'cholesky'"
            )
        if self.method == "naive" and self.bits == 32:
            raise ValueError("method='naive' with bits=32 is method='dense': ask for that")
        if self.method is None and self.bits == 32 and self.root_bits not in (None, 32):
            raise ValueError(
                f"bits=32 with root_bits={self.root_bits} needs method='eigen' or 'cholesky': "
                "'dense', the default at 32 bits, keeps float32 roots"
            )
        if self.storage == "compact" and self.block_size != 64:
            raise ValueError(
                f"storage='compact' needs block_size=64, the side of its tiles; got "
                f"{self.block_size}: leave block_size out, or give storage='paper'"
            )
        if self.first_refresh is not None and self.first_refresh >= self.refresh_every:
            raise ValueError(
                f"first_refresh must be below refresh_every={self.refresh_every} to bring the "
                f"first refresh forward; got {self.first_refresh}"
            )

    def for_group(self, group: Mapping[str, Any]) -> Config:
        """This configuration with what a param group says otherwise."""
        forbidden = sorted(GLOBAL_OPTIONS & group.keys())
        if forbidden:
            raise ValueError(
                f"{forbidden[0]} holds for the whole optimizer and cannot be set in a param group; "
                "give it to the constructor"
            )
        return replace(self, **{name: group[name] for name in GROUP_OPTIONS if name in group})

    def format(self, order: int) -> Format:
        """How factors of this order are stored; small ones keep 32 bits."""
        method = self.method or ("dense" if self.bits == 32 else "cholesky")
        p = round(-1 / self.exponent)
        if order * order < self.min_quantized_numel:
            return Format("dense" if method == "naive" else method, _FLOAT32, _FLOAT32, p=p)
        statistic, root = self._quantizer(self.bits), self._quantizer(self.root_bits)
        # At 32 bits there is nothing that could be told from the rest.
        storage = self.storage or ("compact" if self.block_size == 64 else "paper")
        compact = storage == "compact" and not statistic.bits == root.bits == 32
        return Format(method, statistic, root, compact, p)

    def _quantizer(self, bits: int | None) -> Quantizer:
        bits = self.bits if bits is None else bits
        return _FLOAT32 if bits == 32 else Quantizer(bits, self.mapping, self.block_size)

    @property
    def start_value(self) -> float:
        """Of the statistics' diagonals."""
        return self.damping if self.start is None else self.start


def take_options(
    keywords: MutableMapping[str, Any], defaults: Iterable[tuple[str, Any]] = ()
) -> Config:
    """Take our options out of keywords; what remains is for the base optimizer.

    Args:
        keywords: Of all kinds.
        defaults: An algorithm's own, in the place of those of ``Config``.
    """
    given = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
    config = Config(**{**dict(defaults), **given})
    if config.method is None and config.bits < 32:
        plain = Config(**dict(defaults))
        for name in EIGEN_OPTIONS:
            if getattr(config, name) != getattr(plain, name):
                raise ValueError(
                    f"{name}={given[name]!r} is for method='eigen', which is not the default: "
                    f"give method='eigen', or leave {name} out"
                )
    return config


GLOBAL_OPTIONS = frozenset(
    {
        "workspace_mb",
        "offload_statistics",
        "shard_state",
        "blocks",
        "keep_gradients",
        "cuda_graph",
        "nonfinite",
    }
)
OPTIONS = tuple(field.name for field in fields(Config))
GROUP_OPTIONS = tuple(name for name in OPTIONS if name not in GLOBAL_OPTIONS)
# Of no meaning to other methods.
EIGEN_OPTIONS = ("update_rectify", "refresh_rectify", "qr_iterations", "root")
# How a matrix is stored: fixed once there is state, but a checkpoint is converted.
FORMAT_OPTIONS = (
    "bits",
    "root_bits",
    "method",
    "mapping",
    "block_size",
    "min_quantized_numel",
    "storage",
    "exponent",
)
# Which matrices there are: fixed once there is state, and a checkpoint must agree.
CUT_OPTIONS = ("max_order", "split", "batch_dims", "split_sizes", "precondition")
STRUCTURAL_OPTIONS = FORMAT_OPTIONS + CUT_OPTIONS


def _is_sequence(value: object) -> bool:
    """Whether it is one as a list is; such as the lists of OmegaConf."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _choice(name: str, value: object, allowed: Collection[object]) -> None:
    # By type too: 4.0 == 4 and True == 1, but neither is a bit width.
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


_VALUES = itemgetter(*GROUP_OPTIONS)


class GroupOptions:
    """The options of param groups: the same object as long as they are equal.

    Args:
        config: The optimizer's options, which a group may override.
        statistics: Name of the kind of statistics, for checkpoints.

    Attributes:
        defaults: The entries of a param group that sets nothing itself.
    """

    def __init__(self, config: Config, statistics: str) -> None:
        self._config = config
        options = {name: getattr(config, name) for name in GROUP_OPTIONS}
        self.defaults = {**options, FORMAT_KEY: FORMAT, STATISTICS_KEY: statistics}
        self._known: dict[Any, Config] = {}  # by themselves, and by a group's values

    def __len__(self) -> int:
        return len(self._known)

    def of(self, group: Mapping[str, Any], groups: int) -> Config:
        """Return the options of a group; ``groups`` is the number of all groups."""
        try:
            return self._known[_VALUES(group)]
        except (KeyError, TypeError):  # not seen yet; one is missing, or is a list
            config = self._config.for_group(group)
        if len(self._known) > 4 * groups:
            self._known.clear()  # of numbers that a schedule has left behind
        config = self._known.setdefault(config, config)
        with suppress(KeyError, TypeError):
            self._known[_VALUES(group)] = config
        return config

    def complete(self, groups: Iterable[dict[str, Any]]) -> None:
        """Put the defaults into groups that lack them: new ones, and groups that F has loaded."""
        for group in groups:
            if FORMAT_KEY not in group:
                for name, value in self.defaults.items():
                    group.setdefault(name, value)
