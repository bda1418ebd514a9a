"""Reports of ``kronbit errors`` on the paper's synthetic matrix or on a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronbit.config import FORMAT_KEY, STATISTICS_KEY, Config
from kronbit.factors import Factors, make_method
from kronbit.lab.checkpoints import checkpoints
from kronbit.lab.errors import LabError, lab_error
from kronbit.lab.quantization import errors
from kronbit.lab.quantization.errors import Deviation, Statistic, StorageErrors
from kronbit.linalg.precision import full_precision
from kronbit.messages import named_parameters
from kronbit.state import loading
from kronbit.state.validation import check_outline, checked_leaves
from kronbit.step.schedule import refreshes_at, updates_at

Tell = Callable[[str], object]
# Each method has one of these in its state; the length of its last axis is the order.
_AS_LONG_AS_ORDER = ("eigenvalues", "diagonal", "matrix", "factor")


@dataclass(frozen=True)
class Study:
    """Errors of one matrix for every way to store it, as rows of a table."""

    name: str
    statistic: Statistic
    quantized_to: int | None  # bits, if the matrix was restored from quantised state
    rows: list[StorageErrors]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON, without the matrix itself."""
        return {
            "name": self.name,
            "order": self.statistic.order,
            "condition": self.statistic.condition,
            "exponent": self.statistic.config.exponent,
            "quantized_to": self.quantized_to,
            "rows": [asdict(row) for row in self.rows],
        }


@dataclass(frozen=True)
class HeldErrors:
    """Errors of one inverse root in a checkpoint, compared with the exact root of the statistic.

    ``whole`` is None if the root was never refreshed or no exact root exists.
    """

    parameter: str  # its name, or its position in the param groups
    block: str
    side: str
    order: int
    method: str
    storage: str | None  # None at 32 bits
    bits: int  # of the statistic
    root_bits: int
    condition: float | None  # of the damped statistic; None if it is singular
    updates_since: int | None  # updates after the last refresh; None if staggered
    whole: Deviation | None
    off_diagonal: Deviation | None
    refreshed: Deviation | None  # after a refresh now; None if the root is up to date

    @property
    def name(self) -> str:
        """Name of parameter, block and side. A single block is not named."""
        block = "" if self.block == "block_0" else f" {self.block}"
        return f"{self.parameter}{block} {self.side}"


@dataclass(frozen=True)
class ErrorReport:
    """Errors of the roots in a checkpoint, and of every way to store some matrices."""

    source: str  # name of the checkpoint or of the paper's synthetic matrix
    synthetic: bool
    held: list[HeldErrors]
    studies: list[Study]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON."""
        return {
            "source": self.source,
            "synthetic": self.synthetic,
            "preconditioners": [asdict(held) for held in self.held],
            "matrices": [study.to_dict() for study in self.studies],
        }


def synthetic_errors(
    order: int = 1200,
    bits: Sequence[int] = (4, 8),
    device: torch.device | str = "cpu",
    tell: Tell = lambda text: None,
) -> ErrorReport:
    """Compute the paper's table for its synthetic matrix. ``tell`` is called with its name."""
    name = f"synthetic matrix of order {order}"
    tell(name)
    statistic = errors.synthetic_matrix(order, device)
    study = Study(name, statistic, None, _tables(statistic, bits))
    return ErrorReport(f"{name}, seed 0", True, [], [study])


def _tables(statistic: Statistic, bits: Sequence[int]) -> list[StorageErrors]:
    return [row for width in bits for row in errors.static_table(statistic, width)]


# ------------------------------------------------------------------------------------ checkpoints


@dataclass(frozen=True, eq=False)
class Held:
    """A preconditioner in a checkpoint, as a stack of one, with its step and options."""

    parameter: str
    block: str
    side: str
    step: int
    config: Config
    factors: Factors

    def statistic(self) -> Statistic:
        """Return the stored statistic, which counts as exact."""
        with full_precision():
            return Statistic.of(self.factors.method.matrix(self.factors.tensors)[0], self.config)

    def root(self) -> Tensor:
        """Return the stored root, float64 (n, n)."""
        return self.factors.roots(slice(0, 1))[0].double()


def _read_state(source: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a source for messages, and the optimizer's state dict in it."""
    label, content = "the state dict", source
    if not isinstance(source, Mapping):
        path = Path(source)
        if path.is_dir():
            files = checkpoints(path)
            if not files:
                raise LabError(f"{path} is a folder without checkpoints: give a run, or a file")
            path = files[-1]
        if not path.is_file():
            raise LabError(f"there is no checkpoint {path}")
        label = str(path)
        # A broken file may raise any exception.
        with lab_error(f"cannot read {path} as a checkpoint", Exception, most=200):
            content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Mapping) and "param_groups" not in content:
        content = content.get("optimizer")
    if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
        raise LabError(
            f"{label} holds no optimizer: give a file with its state_dict(), or with a dict that "
            'has it under "optimizer"'
        )
    return label, content


def read_preconditioners(
    label: str, state_dict: Mapping[str, Any], device: torch.device | str = "cpu"
) -> Iterator[Held]:
    """Yield every preconditioner of a state dict, decoded with the options saved in it.

    An error names ``label``, and the key of an entry that contradicts its options.
    """
    groups = state_dict["param_groups"]
    with lab_error(label, TypeError, ValueError):
        check_outline(state_dict, groups)
        # Empty tensors stand in for the parameters of an optimizer, which the reader expects.
        twins = [{**group, "params": [torch.empty(0) for _ in group["params"]]} for group in groups]
        entries = {}
        if any(FORMAT_KEY in group for group in groups):
            statistics = groups[0].get(STATISTICS_KEY, "gradients")
            configs = [Config()] * len(groups)
            entries = loading.read(state_dict, twins, configs, statistics).entries
        if not any(entry.blocks for entry in entries.values()):
            raise LabError(
                f"{label} holds no second-order state: give a checkpoint of Shampoo, CASPR, KFAC "
                "or AdaBK after their first update"
            )
        names = {p: name for name, p, _ in named_parameters(twins, lambda group: Config())}
        for p, entry in entries.items():
            for block, sides in entry.blocks.items():
                for side in ("left", "right"):
                    values = sides.get(side) if isinstance(sides, Mapping) else None
                    factors = _as_factors(values, entry.config, entry.path(block, side), device)
                    yield Held(names[p], block, side, entry.step, entry.config, factors)


@full_precision()
def _as_factors(values: Any, config: Config, where: str, device: torch.device | str) -> Factors:
    """Build a stack of one preconditioner from its entry in a checkpoint."""
    held = values if isinstance(values, Mapping) else {}
    shown = [held[name] for name in _AS_LONG_AS_ORDER if isinstance(held.get(name), Tensor)]
    order = shown[0].shape[-1] if shown and shown[0].dim() else 0
    leaves = checked_leaves(values, make_method(config.format(order)).layout(order), where)
    return errors.factors_of(order, leaves, config, device)


@cache
def _updates_since_refresh(config: Config, step: int) -> int | None:
    """Return the number of updates after the last refresh. In a step, the update comes first."""
    if config.stagger:
        return None
    steps = takewhile(lambda t: not refreshes_at(config, t), range(step, 0, -1))
    return sum(updates_at(config, t) for t in steps)


def _errors(held: Held, statistic: Statistic) -> HeldErrors:
    format, root = held.factors.format, held.root()
    bits, root_bits = format.statistic.bits, format.root.bits
    regular = bool(statistic.damped.min() > 0)
    updates_since = _updates_since_refresh(held.config, held.step)
    whole = off_diagonal = refreshed = None
    if regular and not torch.equal(root, torch.eye(len(root)).to(root)):
        exact = statistic.root()
        whole, off_diagonal = errors.deviations(root, exact)
        if updates_since != 0:
            with full_precision():
                refreshed = Deviation.of(errors.refreshed_root(held.factors, held.config), exact)
    return HeldErrors(
        parameter=held.parameter,
        block=held.block,
        side=held.side,
        order=statistic.order,
        method=format.method,
        storage=None if bits == root_bits == 32 else "compact" if format.compact else "paper",
        bits=bits,
        root_bits=root_bits,
        condition=statistic.condition if regular else None,
        updates_since=updates_since,
        whole=whole,
        off_diagonal=off_diagonal,
        refreshed=refreshed,
    )


def checkpoint_errors(
    source: Path | str | Mapping[str, Any],
    matrices: int = 4,
    bits: Sequence[int] = (4, 8),
    device: torch.device | str = "cpu",
    tell: Tell = lambda text: None,
) -> ErrorReport:
    """Compute the quantisation errors of the inverse roots in a checkpoint.

    Args:
        source: A state dict, or a dict that has one under ``"optimizer"``; a file with one of
            these; or the folder of a run, whose last checkpoint is read.
        matrices: Number of statistics, largest orders first, for which all ways to store them are
            compared. Statistics of a 32-bit run are exact; others have been quantised before.
        bits: Numbers of bits of this comparison. Each gets a table.
        device: Device of the computation.
        tell: Called with the name of each matrix, to show progress.
    """
    label, state_dict = _read_state(source)
    roots = []
    # The largest statistics so far, in order. All of them at once might not fit into memory.
    largest: list[tuple[HeldErrors, Statistic]] = []
    for held in read_preconditioners(label, state_dict, device):
        statistic = held.statistic()
        roots.append(_errors(held, statistic))
        tell(roots[-1].name)
        if roots[-1].condition is not None and statistic.lam.max() > 0:
            largest.append((roots[-1], statistic))
            largest = sorted(largest, key=lambda pair: -pair[0].order)[:matrices]
    studies = []
    for root, statistic in largest:
        tell(f"every way to store {root.name}")
        quantized_to = root.bits if root.bits < 32 else None
        studies.append(Study(root.name, statistic, quantized_to, _tables(statistic, bits)))
    return ErrorReport(label, False, roots, studies)
