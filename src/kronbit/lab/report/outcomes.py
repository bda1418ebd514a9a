"""What each optimizer of a comparison came to: its seeds together, beside base and 32 bits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

# Settings that decide how much is written down, not what comes out.
_BOOKKEEPING = (
    *("seed", "about", "paper", "log_every", "eval_every", "checkpoint_every", "keep"),
    "watched_blocks",
)


@dataclass(frozen=True)
class Spread:
    """A number over some runs.

    Attributes:
        mean: Of a single run, its very number.
        deviation: The largest distance of a run from the mean; None for a single run.
    """

    mean: float
    deviation: float | None

    @classmethod
    def over(cls, values: Sequence[float | None]) -> Spread | None:
        """Of all values; None if one is missing, as a mean without it would be another."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        mean = sum(known) / len(known)
        far = max(abs(value - mean) for value in known) if len(known) > 1 else None
        return cls(mean, far)

    def text(self, write: Write) -> str:
        """The mean, and the deviation if there are several runs."""
        if self.deviation is None or not math.isfinite(self.deviation):
            return write(self.mean)
        if write is percent_text:
            return f"{100 * self.mean:.1f} ± {100 * self.deviation:.1f} %"
        return f"{write(self.mean)} ± {write(self.deviation)}"


@dataclass(frozen=True)
class Outcome:
    """What the runs of one variant came to.

    Attributes:
        label: The optimizer's name for people, unlike all others of its recipe.
        variant: Its key.
        runs: All its runs.
        counted: Those that numbers and curves are made of: unfinished ones only where there is no
            other. Diverged runs count.
        losses: Validation loss over the course of training.
        state_32: Bytes of the 32-bit second-order state of its family; None if nothing has it.
        steps_to_base: When its validation loss first was at most the base's last one, as a share of
            the base's steps; if it never was, the share that it trained for.
        reached_base: Whether it ever was.
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
        """Second-order state, in bytes."""
        return self.spread("state")

    @property
    def of_32(self) -> float | None:
        """Second-order state as a share of the 32-bit one of its family."""
        state = self.state
        return None if state is None or not self.state_32 else state.mean / self.state_32

    def spread(self, *path: str) -> Spread | None:
        """A number of the runs.

        Args:
            *path: As for ``Run.number``.
        """
        return Spread.over([run.number(*path) for run in self.counted])

    @property
    def full_label(self) -> str:
        """The label, with what to beware of."""
        diverged = any(run.diverged for run in self.counted)
        return with_notes(self.label, diverged, all(run.finished for run in self.counted))


@dataclass(frozen=True)
class Column:
    """A column of the table that a comparison ends with.

    Attributes:
        key: Names it in the report.
        title: Its heading; breaks into two lines at the line break.
        importance: The lowest go first where the terminal is narrow.
        value: Its number, if the outcome has it.
        text: How it reads.
    """

    key: str
    title: str
    importance: int
    value: Callable[[Outcome], float | None]
    text: Callable[[Outcome], str]


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """The outcomes of the runs of one recipe, in their fixed order.

    Runs are seeds of one variant if their label, their variant and all settings that matter are
    equal; where only settings tell two variants apart, their labels name those settings.

    Args:
        runs: Runs of one recipe.
    """
    gathered: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        settings = json.dumps(_settings(run), sort_keys=True, default=str)
        gathered.setdefault((run.variant, run.label, settings), []).append(run)
    found = []
    for (variant, label, _), own in gathered.items():
        alike = [others[0] for key, others in gathered.items() if key[:2] == (variant, label)]
        counted = [run for run in own if run.finished or run.diverged] or own
        full = label + _difference(own[0], alike)
        found.append(Outcome(full, variant, own, counted, curve(counted, "evals", "loss")))
    found.sort(key=lambda own: rank(own.variant))
    return [_beside(own, found) for own in found]


def find(found: Sequence[Outcome], variant: str) -> Outcome | None:
    """The outcome of a variant, if there is one and only one.

    Args:
        found: All outcomes of a recipe.
        variant: Its key.
    """
    own = [outcome for outcome in found if outcome.variant == variant]
    return own[0] if len(own) == 1 else None


def _beside(own: Outcome, found: Sequence[Outcome]) -> Outcome:
    """The outcome with what it is beside the base and beside 32 bits."""
    base, full = find(found, "base"), find(found, f"{own.variant.split('-')[0]}-32")
    state_32 = None if full is None else _mean(full.state)
    steps_to_base, reached = None, False
    if base is not None and own.losses.steps and any(base.losses.steps):
        final, last = base.losses.mean[-1], base.losses.steps[-1]
        if math.isfinite(final):
            step = own.losses.first_at_most(final)
            reached = step is not None
            steps_to_base = (own.losses.steps[-1] if step is None else step) / last
    return replace(own, state_32=state_32, steps_to_base=steps_to_base, reached_base=reached)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings without mappings inside: ``model.name`` and so on.

    Args:
        settings: What a recipe says.
        prefix: Goes before every name.
    """
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _settings(run: Run) -> dict[str, Any]:
    """What decides a run, the machine included: times of two machines have no mean."""
    settings = {**flat(run.settings), "hardware": run.hardware}
    return {key: value for key, value in settings.items() if key not in _BOOKKEEPING}


def _difference(run: Run, alike: Sequence[Run]) -> str:
    """What tells a run from those that are named alike, in brackets."""
    own, others = _settings(run), [_settings(other) for other in alike]
    names = dict.fromkeys(name for settings in (own, *others) for name in settings)
    told = [
        f"{name.split('.')[-1]}={own.get(name)}"
        for name in names
        if any(other.get(name) != own.get(name) for other in others)
    ]
    return f" ({', '.join(told)})" if told else ""


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def _spread_column(title: str, importance: int, write: Write, *path: str) -> Column:
    # Elsewhere than in what was learnt, the spread over seeds is only noise of the machine.
    learnt = path in (("loss",), ("accuracy",), ("train_loss",))

    def text(outcome: Outcome) -> str:
        spread = outcome.spread(*path)
        return spread.text(write) if spread is not None and learnt else write(_mean(spread))

    return Column(".".join(path), title, importance, lambda own: _mean(own.spread(*path)), text)


def _steps_text(outcome: Outcome) -> str:
    if outcome.steps_to_base is None:
        return MISSING
    return f"{'' if outcome.reached_base else '> '}{outcome.steps_to_base:.2f}"


COLUMNS = (
    _spread_column("training\nloss", 2, loss_text, "train_loss"),
    _spread_column("validation\nloss", 9, loss_text, "loss"),
    _spread_column("accuracy", 8, percent_text, "accuracy"),
    Column("steps_to_base", "steps to\nbase loss", 4, lambda own: own.steps_to_base, _steps_text),
    _spread_column("2nd-order\nstate", 7, lambda size: bytes_text(size or None), "state"),
    Column("of_32", "of\n32-bit", 5, lambda own: own.of_32, lambda own: share_text(own.of_32)),
    _spread_column("peak\nmemory", 3, bytes_text, "memory", "peak"),
    _spread_column("ms per\nstep", 6, time_text, "step_ms", "median"),
    _spread_column("seconds", 1, time_text, "seconds"),
)


def shown_columns(found: Sequence[Outcome]) -> list[Column]:
    """The columns in which some outcome has a number.

    Args:
        found: The rows of the table.
    """
    return [column for column in COLUMNS if any(column.value(own) for own in found)]


def explain_steps(found: Sequence[Outcome]) -> str:
    """A sentence about steps to base loss; empty where there is nothing to compare with.

    Args:
        found: The rows of the table.
    """
    base = find(found, "base")
    if base is None or len(found) == 1:
        return ""
    return (
        "Steps to base loss: when the validation loss first was at most the last one of "
        f"{base.label}, as a share of its steps."
    )
