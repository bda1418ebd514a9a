"""Outcomes of a comparison: seeds of a variant, combined and compared with base and 32 bits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from kronbit.lab.report import numbers
from kronbit.lab.report.curves import Curve, curve, mean
from kronbit.lab.report.runs import Run, position, with_notes

# Settings that control logging and checkpoints; they do not affect the result.
_BOOKKEEPING = (
    *("seed", "about", "paper", "log_every", "eval_every", "checkpoint_every", "keep"),
    "watched_blocks",
)
# The spread of times and memory over seeds is noise of the machine; tables do not show it.
_WITH_SPREAD = ("loss", "accuracy", "train_loss", "steps_to_base")


@dataclass(frozen=True, eq=False)
class Outcome:
    """The combined result of the runs of one variant.

    Attributes:
        counted: Runs that enter numbers and curves. Diverged runs count; unfinished ones count only
            if the variant has no finished run.
        losses: Validation loss over the course of training.
        state_32: Bytes of second-order state of the 32-bit variant of the same algorithm, if any.
        steps_to_base: Step at which the validation loss first is at most the base's last one, as a
            fraction of the base's steps. If the loss is never reached, the fraction that was
            trained.
    """

    label: str  # unique within the recipe
    variant: str
    counted: list[Run]
    losses: Curve
    state_32: float | None = None
    steps_to_base: float | None = None
    reached_base: bool = False
    color: str = ""  # as #rrggbb
    style: Any = None  # line style of matplotlib

    def number(self, key: str) -> float | None:
        """Return the mean of a number over the counted runs, or None if a run has no such number.

        Three more numbers are derived: ``"runs"``, ``"steps_to_base"``, and ``"of_32"``, the
        second-order state as a fraction of ``state_32``.
        """
        if key == "runs":
            return len(self.counted)
        if key == "steps_to_base":
            return self.steps_to_base
        if key == "of_32":
            state = self.number("state")
            return None if state is None or not self.state_32 else state / self.state_32
        values = self._values(key)
        return mean(values) if values else None

    def text(self, key: str, write: numbers.Write) -> str:
        """Format a number, followed by the largest distance of a run from the mean."""
        number, values = self.number(key), self._values(key)
        if key == "steps_to_base" and number is not None and not self.reached_base:
            return f"> {write(number)}"
        far = max((abs(value - mean(values)) for value in values), default=math.inf)
        if len(values) < 2 or not math.isfinite(far):
            return write(number)
        return f"{write(number).removesuffix(' %')} ± {write(far)}"

    def _values(self, key: str) -> list[float]:
        """Return a number of every counted run, or nothing if it is missing in one of them."""
        known = [value for run in self.counted if (value := run.number(key)) is not None]
        return known if len(known) == len(self.counted) else []

    @property
    def full_label(self) -> str:
        """The label, marked if a run diverged or is unfinished."""
        diverged = any(run.diverged for run in self.counted)
        return with_notes(self.label, diverged, all(run.finished for run in self.counted))


@dataclass(frozen=True)
class Column:
    """A number in a table of runs or outcomes, or in a figure; ``title`` is its heading."""

    key: str
    title: str
    write: numbers.Write
    importance: int = 0  # a narrow terminal drops the columns of lowest importance first

    def text(self, row: Run | Outcome) -> str:
        """Return the displayed text of a row."""
        if isinstance(row, Outcome) and self.key in _WITH_SPREAD:
            return row.text(self.key, self.write)
        return self.write(row.number(self.key))


COLUMNS = (
    Column("train_loss", "training\nloss", numbers.loss_text, 2),
    Column("loss", "validation\nloss", numbers.loss_text, 9),
    Column("accuracy", "accuracy", numbers.percent_text, 8),
    Column("steps_to_base", "steps to\nbase loss", numbers.ratio_text, 4),
    Column("state", "2nd-order\nstate", lambda size: numbers.bytes_text(size or None), 7),
    Column("of_32", "of\n32-bit", numbers.share_text, 5),
    Column("memory.peak", "peak\nmemory", numbers.bytes_text, 3),
    Column("step_ms.median", "ms per\nstep", numbers.time_text, 6),
    Column("seconds", "seconds", numbers.time_text, 1),
)


def shown_columns(compared: Sequence[Outcome]) -> list[Column]:
    """Return the columns in which some outcome has a number other than 0."""
    return [column for column in COLUMNS if any(row.number(column.key) for row in compared)]


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Combine the runs of one recipe into outcomes, in their fixed order.

    Runs count as seeds of one variant if label, variant, hardware and all settings that affect the
    result are equal. If two variants differ in settings alone, their labels name those settings.
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
        combined.append(Outcome(full, variant, counted, curve(counted, "evals", "loss")))
    combined.sort(key=lambda outcome: position(outcome.variant))
    return [_compared(outcome, combined) for outcome in combined]


def find(compared: Sequence[Outcome], variant: str) -> Outcome | None:
    """Return the outcome of a variant, or None unless exactly one outcome has that variant."""
    matches = [outcome for outcome in compared if outcome.variant == variant]
    return matches[0] if len(matches) == 1 else None


def _compared(outcome: Outcome, others: Sequence[Outcome]) -> Outcome:
    """Return the outcome with its comparison with the base and the 32-bit variant filled in."""
    base, full = find(others, "base"), find(others, f"{outcome.variant.split('-')[0]}-32")
    outcome = replace(outcome, state_32=full.number("state") if full else None)
    losses = outcome.losses
    if base is None or not losses.steps or not any(base.losses.steps):
        return outcome
    final = base.losses.mean[-1]
    if not math.isfinite(final):
        return outcome
    step = losses.first_at_most(final)
    steps = (losses.steps[-1] if step is None else step) / base.losses.steps[-1]
    return replace(outcome, steps_to_base=steps, reached_base=step is not None)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to names with dots, such as ``model.name``."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping)
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that affect the result, and the hardware, which affects times."""
    settings = {**flat(run.settings), "hardware": run.hardware}
    return {key: value for key, value in settings.items() if key not in _BOOKKEEPING}


def _difference(run: Run, alike: Sequence[Run]) -> str:
    """Return the settings in which a run differs from runs of the same label, in brackets."""
    settings, others = _settings(run), [_settings(other) for other in alike]
    different = [
        f"{name.split('.')[-1]}={settings.get(name)}"
        for name in dict.fromkeys(chain(settings, *others))
        if any(other.get(name) != settings.get(name) for other in others)
    ]
    return f" ({', '.join(different)})" if different else ""


def explain_steps(compared: Sequence[Outcome]) -> str:
    """Explain the column of steps to base loss; empty if the base is missing or alone."""
    base = find(compared, "base")
    if base is None or len(compared) == 1:
        return ""
    return (
        f"Steps to base loss: the step at which the validation loss reaches {base.label}'s last "
        f"one, as a fraction of {base.label}'s steps."
    )
