"""What ``kronbit errors`` finds: in the paper's synthetic matrix, or in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronbit import checkpoint, outline
from kronbit.config import FORMAT_KEY, STATISTICS_KEY, Config
from kronbit.factors import Factors, make_method
from kronbit.lab.errors import LabError
from kronbit.lab.quantisation.errors import (
    Deviation,
    Row,
    Statistic,
    deviations,
    refreshed_root,
    static_table,
    synthetic_matrix,
)
from kronbit.lab.training.checkpoints import checkpoints
from kronbit.precision import full_precision
from kronbit.report import parameter_name
from kronbit.state import checked_leaves

# One of them is in the state of every method, and its last axis is as long as the order.
_AS_LONG_AS_ORDER = ("eigenvalues", "diagonal", "matrix", "factor")


@dataclass(frozen=True)
class Study:
    """The static analysis of one matrix.

    Attributes:
        name: Of the matrix.
        statistic: The matrix.
        quantized_to: Bits, if the matrix itself comes out of quantised state; else ``None``.
        rows: The table.
    """

    name: str
    statistic: Statistic
    quantized_to: int | None
    rows: tuple[Row, ...]

    @classmethod
    def of(
        cls, name: str, statistic: Statistic, bits: Sequence[int], quantized_to: int | None = None
    ) -> Study:
        """Fill the tables for several numbers of bits."""
        rows = tuple(row for width in bits for row in static_table(statistic, width))
        return cls(name, statistic, quantized_to, rows)

    @property
    def exponent(self) -> float:
        """The s of f(A) = A^s."""
        return self.statistic.config.exponent

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON; without the matrix."""
        return {
            "name": self.name,
            "order": self.statistic.order,
            "condition": self.statistic.condition,
            "exponent": self.exponent,
            "quantized_to": self.quantized_to,
            "rows": [asdict(row) for row in self.rows],
        }


@dataclass(frozen=True)
class HeldErrors:
    """The error of one inverse root in a checkpoint.

    Attributes:
        parameter: Its name, or its place in the param groups.
        block: The block's key.
        side: ``left`` or ``right``.
        order: n.
        method: How the statistic is kept.
        storage: ``paper`` or ``compact``; ``None`` at 32 bits.
        bits: Of the statistic.
        root_bits: Of the root.
        condition: Of the statistic with its damping; ``None``: singular, and not damped.
        updates_since: Updates of the statistic after the root was refreshed, as scheduled;
            ``None``: it cannot be told (staggered).
        whole: Errors of the stored root against the exact one of the stored statistic; ``None``: it
            has not been refreshed yet, or there is no exact one.
        off_diagonal: The same without diagonals.
        refreshed: What ``whole`` would be after a refresh: without the updates since the last one.
            ``None``, if there was none.
    """

    parameter: str
    block: str
    side: str
    order: int
    method: str
    storage: str | None
    bits: int
    root_bits: int
    condition: float | None
    updates_since: int | None
    whole: Deviation | None
    off_diagonal: Deviation | None
    refreshed: Deviation | None

    @property
    def name(self) -> str:
        """The side of which block of which parameter."""
        block = "" if self.block == "block_0" else f" {self.block}"
        return f"{self.parameter}{block} {self.side}"


@dataclass(frozen=True)
class ErrorReport:
    """All that is found.

    Attributes:
        source: The checkpoint, or what the synthetic matrix is.
        synthetic: Whether it is that: then the paper's numbers can be shown beside ours.
        held: The roots in the checkpoint.
        studies: Matrices with every way to keep them.
    """

    source: str
    synthetic: bool
    held: tuple[HeldErrors, ...]
    studies: tuple[Study, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for JSON."""
        return {
            "source": self.source,
            "synthetic": self.synthetic,
            "preconditioners": [asdict(held) for held in self.held],
            "matrices": [study.to_dict() for study in self.studies],
        }


def synthetic_errors(
    order: int = 1200,
    seed: int = 0,
    bits: Sequence[int] = (4, 8),
    device: torch.device | str = "cpu",
    tell: Callable[[str], object] = lambda text: None,
) -> ErrorReport:
    """The paper's tables for its synthetic matrix.

    Args:
        order: n.
        seed: Of the eigenvectors.
        bits: Numbers of bits, a table each.
        device: Where it is computed.
        tell: Takes what is being looked at, for a line of progress.
    """
    name = f"synthetic matrix of order {order}"
    tell(name)
    found = Study.of(name, synthetic_matrix(order, seed, device), bits)
    return ErrorReport(f"{name}, seed {seed}", True, (), (found,))


# ------------------------------------------------------------------------------------ checkpoints


@dataclass(frozen=True, eq=False)
class Held:
    """One side of a block as a checkpoint holds it.

    Attributes:
        parameter: Its name, or its place in the param groups.
        block: The block's key.
        side: ``left`` or ``right``.
        step: Gradients that the parameter has seen.
        config: Its options.
        factors: Its tensors.
    """

    parameter: str
    block: str
    side: str
    step: int
    config: Config
    factors: Factors

    def statistic(self) -> Statistic:
        """What is stored of A, as if it were exact."""
        with full_precision():
            return Statistic.of(self.factors.method.matrix(self.factors.tensors)[0], self.config)

    def root(self) -> Tensor:
        """What is stored of the root, float64 (n, n)."""
        return self.factors.roots(slice(0, 1))[0].double()


def read_state(source: Path | str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The optimizer's state dict that is in a file.

    Args:
        source: A file with an optimizer's ``state_dict()``, or with a dict that has one under
            ``"optimizer"``; the folder of a run, for its last checkpoint; or one of these dicts.

    Returns:
        What to call it in messages, and the state dict.

    Raises:
        LabError: If there is none.
    """
    label, content = ("the state dict", source) if isinstance(source, Mapping) else _load(source)
    if isinstance(content, Mapping) and "param_groups" not in content:
        content = content.get("optimizer")
    if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
        raise LabError(
            f"{label} holds no optimizer: give a file with its state_dict(), or with a dict that "
            'has it under "optimizer"'
        )
    return label, content


def _load(source: Path | str) -> tuple[str, Any]:
    """The path and the content of a checkpoint, or of the last one of a folder."""
    path = Path(source)
    if path.is_dir():
        found = checkpoints(path)
        if not found:
            raise LabError(f"{path} is a folder without checkpoints: give a run, or a file")
        path = found[-1]
    if not path.is_file():
        raise LabError(f"there is no checkpoint {path}")
    try:
        return str(path), torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file raises anything
        reason = " ".join(str(error).split())[:200]
        raise LabError(f"cannot read {path} as a checkpoint: {reason}") from error


def read_preconditioners(
    label: str, state_dict: Mapping[str, Any], device: torch.device | str = "cpu"
) -> Iterator[Held]:
    """Every preconditioner of a state dict, decoded by the options that it was written with.

    Args:
        label: What to call it in messages.
        state_dict: An optimizer's.
        device: Where to decode.

    Raises:
        LabError: If it does not hold any, or not what its options say; by key.
    """
    groups = state_dict["param_groups"]
    try:
        outline.check(state_dict, groups)
        if not any(FORMAT_KEY in group for group in groups):
            raise LabError(f"{label} {_NOTHING}")
        # The reader matches a checkpoint with an optimizer's parameters. These stand in for them.
        own = [{**group, "params": [torch.empty(0) for _ in group["params"]]} for group in groups]
        names = {
            p: parameter_name(group, index, number)
            for index, group in enumerate(own)
            for number, p in enumerate(group["params"])
        }
        statistics = groups[0].get(STATISTICS_KEY, "gradients")
        entries = checkpoint.read(state_dict, own, [Config()] * len(own), statistics).entries
        if not any(entry.blocks for entry in entries.values()):
            raise LabError(f"{label} {_NOTHING}")
        for p, entry in entries.items():
            for block, sides in entry.blocks.items():
                for side in ("left", "right"):
                    values = sides.get(side) if isinstance(sides, Mapping) else None
                    where = entry.path(block, side)
                    factors = _as_factors(values, entry.config, where, torch.device(device))
                    yield Held(names[p], block, side, entry.step, entry.config, factors)
    except (TypeError, ValueError) as error:
        raise LabError(f"{label}: {error}") from error


_NOTHING = (
    "holds no second-order state: give a checkpoint of Shampoo, CASPR, KFAC or AdaBK after "
    "their first update"
)


@full_precision()
def _as_factors(values: Any, config: Config, where: str, device: torch.device) -> Factors:
    """A stack of one, with what a checkpoint holds of one side of a block."""
    held = values if isinstance(values, Mapping) else {}
    shown = [held[name] for name in _AS_LONG_AS_ORDER if isinstance(held.get(name), Tensor)]
    order = shown[0].shape[-1] if shown and shown[0].dim() else 0
    format = config.format(order)
    leaves = checked_leaves(values, make_method(format).layout(order), where)
    factors = Factors(order, 1, format, config.start_value, device)
    for name, leaf in leaves.items():
        factors.tensors[name][0].copy_(leaf)
    return factors


@cache
def _updates_since_refresh(config: Config, step: int) -> int | None:
    """Updates after the last refresh, at which the statistic is updated first."""
    count = 0
    for t in range(step, 0, -1):
        if config.stagger or config.refreshes_at(t):
            break
        count += config.updates_at(t)
    return None if config.stagger else count


def _errors(held: Held, statistic: Statistic) -> HeldErrors:
    format, root = held.factors.format, held.root()
    eye = torch.eye(statistic.order, dtype=root.dtype, device=root.device)
    regular = bool(statistic.damped.min() > 0)
    behind = _updates_since_refresh(held.config, held.step)
    whole = off_diagonal = now = None
    if regular and not torch.equal(root, eye):
        exact = statistic.root()
        whole, off_diagonal = deviations(root, exact)
        if behind != 0:
            with full_precision():
                now = Deviation.of(refreshed_root(held.factors, held.config), exact)
    bits, root_bits = format.statistic.bits, format.root.bits
    stored = "compact" if format.compact else "paper"
    return HeldErrors(
        parameter=held.parameter,
        block=held.block,
        side=held.side,
        order=statistic.order,
        method=format.method,
        storage=None if bits == root_bits == 32 else stored,
        bits=bits,
        root_bits=root_bits,
        condition=statistic.condition if regular else None,
        updates_since=behind,
        whole=whole,
        off_diagonal=off_diagonal,
        refreshed=now,
    )


def checkpoint_errors(
    source: Path | str | Mapping[str, Any],
    matrices: int = 4,
    bits: Sequence[int] = (4, 8),
    device: torch.device | str = "cpu",
    tell: Callable[[str], object] = lambda text: None,
) -> ErrorReport:
    """What quantisation has cost the inverse roots in a checkpoint, and would cost otherwise.

    Args:
        source: See ``read_state``.
        matrices: So many statistics, those of the largest order, are kept in every way, to compare.
            Those of a 32-bit run are exact; others have been quantised before.
        bits: Numbers of bits for these, a table each.
        device: Where it is computed.
        tell: Takes what is being looked at, for a line of progress.

    Raises:
        LabError: If the file cannot be read, or holds no second-order state.
    """
    label, state_dict = read_state(source)
    found: list[HeldErrors] = []
    # The largest so far with their place, largest first; all at once would fill the memory.
    largest: list[tuple[int, int, HeldErrors, Statistic]] = []
    for place, held in enumerate(read_preconditioners(label, state_dict, device)):
        statistic = held.statistic()
        found.append(_errors(held, statistic))
        tell(found[-1].name)
        if found[-1].condition is not None and statistic.lam.max() > 0:
            largest.append((-statistic.order, place, found[-1], statistic))
            largest = sorted(largest, key=lambda own: own[:2])[:matrices]
    studies = []
    for *_, errors, statistic in largest:
        tell(f"every way to keep {errors.name}")
        quantized_to = errors.bits if errors.bits < 32 else None
        studies.append(Study.of(errors.name, statistic, bits, quantized_to))
    return ErrorReport(label, False, tuple(found), tuple(studies))
