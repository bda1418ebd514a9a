"""Outcomes of a comparison: seeds of a variant, combined and compared with base and 32 bits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

from kronbit.lab.report.curves import Curve, curve
from kronbit.lab.report.numbers import (
    MISSING,
    Write,
    bytes_text,
    loss_text,
    percent_text,
    share_text,
    time_text,
)
from kronbit.lab.report.runs import Run, rank, with_notes

T = TypeVar("T")

# Settings that control logging and checkpoints; they do not affect the result.
_BOOKKEEPING = (
    *("seed", "about", "paper", "log_every", "eval_every", "checkpoint_every", "keep"),
    "watched_blocks",
)


@dataclass(frozen=True)
class Spread:
    """The mean and spread of a number over runs.

    Attributes:
        mean: Mean over the runs.
        deviation: Largest distance of a run from the mean; None for a single run.
    """

    mean: float
    deviation: float | None

    @classmethod
    def over(cls, values: Sequence[float | None]) -> Spread | None:
        """Combine the values of runs. The result is None if a value is missing."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        mean = sum(known) / len(known)
        far = max(abs(value - mean) for value in known) if len(known) > 1 else None
        return cls(mean, far)

    def text(self, write: Write) -> str:
        """Format the mean, followed by the deviation if there are several runs."""
        if self.deviation is None or not math.isfinite(self.deviation):
            return write(self.mean)
        if write is percent_text:
            return f"{100 * self.mean:.1f} ± {100 * self.deviation:.1f} %"
        return f"{write(self.mean)} ± {write(self.deviation)}"


@dataclass(frozen=True)
class Outcome:
    """The combined result of the runs of one variant.

    Attributes:
        label: Display name of the optimizer, unique within the recipe.
        variant: Key of the variant.
        runs: All runs of the variant.
        counted: Runs that enter numbers and curves. Diverged runs count; unfinished ones count only
            if the variant has no finished run.
        losses: Validation loss over the course of training.
        state_32: Bytes of second-order state of the 32-bit variant of the same algorithm, or None
            if the comparison has no such variant.
        steps_to_base: Step at which the validation loss first is at most the base's last one, as a
            fraction of the base's steps. If the loss is never reached, the fraction that was
            trained.
        reached_base: True if the base's last loss is reached.
    """

    label: str
    variant: str
    runs: list[Run]
    counted: list[Run]
    losses: Curve
    state_32: float | None = None
    steps_to_base: float | None = None
    reached_base: bool = False

    @property
    def state(self) -> Spread | None:
        """Bytes of second-order state."""
        return self.spread("state")

    @property
    def of_32(self) -> float | None:
        """Second-order state as a fraction of ``state_32``."""
        state = self.state
        return None if state is None or not self.state_32 else state.mean / self.state_32

    def spread(self, *path: str) -> Spread | None:
        """Combine a number of the counted runs.

        Args:
            *path: Keys of the number, as in ``Run.number``.
        """
        return Spread.over([run.number(*path) for run in self.counted])

    @property
    def full_label(self) -> str:
        """The label, marked if a run diverged or is unfinished."""
        diverged = any(run.diverged for run in self.counted)
        return with_notes(self.label, diverged, all(run.finished for run in self.counted))


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table of runs or outcomes.

    Attributes:
        key: Key of the column in the report.
        title: Heading, which may contain a line break.
        value: Returns the number of a row, or None if it is missing.
        text: Returns the displayed text of a row.
        importance: A narrow terminal drops the columns of lowest importance first.
    """

    key: str
    title: str
    value: Callable[[T], float | None]
    text: Callable[[T], str]
    importance: int = 0


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Combine the runs of one recipe into outcomes, in their fixed order.

    Runs are seeds of one variant if label, variant, hardware and all settings that affect the
    result are equal. If two variants differ in settings alone, their labels name those settings.

    Args:
        runs: Runs of one recipe.
    """
    gathered: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        settings = json.dumps(_settings(run), sort_keys=True, default=str)
        gathered.setdefault((run.variant, run.label, settings), []).append(run)
    combined = []
    for (variant, label, _), seeds in gathered.items():
        alike = [others[0] for key, others in gathered.items() if key[:2] == (variant, label)]
        counted = [run for run in seeds if run.finished or run.diverged] or seeds
        full = label + _difference(seeds[0], alike)
        combined.append(Outcome(full, variant, seeds, counted, curve(counted, "evals", "loss")))
    combined.sort(key=lambda outcome: rank(outcome.variant))
    return [_compared(outcome, combined) for outcome in combined]


def find(compared: Sequence[Outcome], variant: str) -> Outcome | None:
    """Return the outcome of a variant, or None unless exactly one outcome has that variant.

    Args:
        compared: All outcomes of a recipe.
        variant: Key of the variant.
    """
    matches = [outcome for outcome in compared if outcome.variant == variant]
    return matches[0] if len(matches) == 1 else None


def _compared(outcome: Outcome, others: Sequence[Outcome]) -> Outcome:
    """Return the outcome with its comparison with the base and the 32-bit variant filled in."""
    base, full = find(others, "base"), find(others, f"{outcome.variant.split('-')[0]}-32")
    state_32 = None if full is None else _mean(full.state)
    steps_to_base, reached = None, False
    losses = outcome.losses
    if base is not None and losses.steps and any(base.losses.steps):
        final, last = base.losses.mean[-1], base.losses.steps[-1]
        if math.isfinite(final):
            step = losses.first_at_most(final)
            reached = step is not None
            steps_to_base = (losses.steps[-1] if step is None else step) / last
    return replace(outcome, state_32=state_32, steps_to_base=steps_to_base, reached_base=reached)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to names with dots, such as ``model.name``.

    Args:
        settings: Settings of a recipe.
        prefix: Prefix of every name.
    """
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that affect the result, and the hardware, which affects times."""
    settings = {**flat(run.settings), "hardware": run.hardware}
    return {key: value for key, value in settings.items() if key not in _BOOKKEEPING}


def _difference(run: Run, alike: Sequence[Run]) -> str:
    """Return the settings in which a run differs from runs of the same label, in brackets."""
    settings, others = _settings(run), [_settings(other) for other in alike]
    names = dict.fromkeys(name for mapping in (settings, *others) for name in mapping)
    different = [
        f"{name.split('.')[-1]}={settings.get(name)}"
        for name in names
        if any(other.get(name) != settings.get(name) for other in others)
    ]
    return f" ({', '.join(different)})" if different else ""


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def _spread_column(title: str, importance: int, write: Write, *path: str) -> Column[Outcome]:
    # The spread of times and memory over seeds is noise of the machine; it is not shown.
    learnt = path in (("loss",), ("accuracy",), ("train_loss",))

    def value(outcome: Outcome) -> float | None:
        return _mean(outcome.spread(*path))

    def text(outcome: Outcome) -> str:
        spread = outcome.spread(*path)
        return spread.text(write) if spread is not None and learnt else write(_mean(spread))

    return Column(".".join(path), title, value, text, importance)


def _steps_text(outcome: Outcome) -> str:
    if outcome.steps_to_base is None:
        return MISSING
    return f"{'' if outcome.reached_base else '> '}{outcome.steps_to_base:.2f}"


COLUMNS: tuple[Column[Outcome], ...] = (
    _spread_column("training\nloss", 2, loss_text, "train_loss"),
    _spread_column("validation\nloss", 9, loss_text, "loss"),
    _spread_column("accuracy", 8, percent_text, "accuracy"),
    Column("steps_to_base", "steps to\nbase loss", attrgetter("steps_to_base"), _steps_text, 4),
    _spread_column("2nd-order\nstate", 7, lambda size: bytes_text(size or None), "state"),
    Column("of_32", "of\n32-bit", attrgetter("of_32"), lambda row: share_text(row.of_32), 5),
    _spread_column("peak\nmemory", 3, bytes_text, "memory", "peak"),
    _spread_column("ms per\nstep", 6, time_text, "step_ms", "median"),
    _spread_column("seconds", 1, time_text, "seconds"),
)


def shown_columns(columns: Sequence[Column[T]], rows: Sequence[T]) -> list[Column[T]]:
    """Return the columns in which some row has a number other than 0.

    Args:
        columns: Columns of the table.
        rows: Rows of the table.
    """
    return [column for column in columns if any(map(column.value, rows))]


def explain_steps(compared: Sequence[Outcome]) -> str:
    """Explain the column of steps to base loss; empty if the base is missing or alone.

    Args:
        compared: Outcomes in the rows of the table.
    """
    base = find(compared, "base")
    if base is None or len(compared) == 1:
        return ""
    return (
        f"Steps to base loss: the step at which the validation loss reaches {base.label}'s last "
        f"one, as a fraction of {base.label}'s steps."
    )
