"""Steps that end in an error or Ctrl-C: the note for the user, and the record of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kronbit.blocks.batches import Part, rows_of
from kronbit.blocks.gradients import StepGradients
from kronbit.config import Config
from kronbit.factors import Batch, Factors
from kronbit.interruptions import cleaning_up, run_then

_AGAIN = (
    "Once the cause is removed, step() can be called again (with several ranks: load the last "
    "checkpoint instead). Second-order state that is already updated is not updated twice"
)


def refuse_capture() -> None:
    """Raise an error if a CUDA graph is being captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() cannot be part of a CUDA graph: at every step, the host decides which blocks "
            "are updated. Capture forward and backward alone; the step captures graphs itself "
            "(cuda_graph=True)"
        )


class Stage:
    """How far a step has come. ``str`` returns the note on an error: what has changed, what to do.

    Attributes:
        rewriting: True if gradients may be G̃.
        in_base: True if weights and F's state may be new.
        complete: True if the step counts: weights, F's state and the second-order state are new.
    """

    def __init__(self, config: Config) -> None:
        self._keep, self._zeroes = config.keep_gradients, config.nonfinite == "zero"
        self.rewriting = self.in_base = self.complete = False

    def __str__(self) -> str:
        if self.complete:
            return "The step is complete and counts: do not take it again."
        weights, remedy = "no weight has changed", _AGAIN
        if self.in_base:
            weights = "the base optimizer had begun, so some weights may have changed"
            remedy = f"{_AGAIN}, but weights that have changed are"
        if self._keep or not self.rewriting:
            but = ", except that non-finite ones may be zero now" * (
                self._zeroes and not self._keep
            )
            return f"In this step, {weights}, and gradients are unchanged{but}. {remedy}."
        return (
            f"In this step, {weights}, but gradients may be preconditioned already: compute them "
            f"again (keep_gradients=True would have kept them). {remedy}."
        )


@contextmanager
def report_failure(config: Config) -> Iterator[Stage]:
    """Add a note to every error: how far the step has come, and how to continue."""
    stage = Stage(config)
    try:
        yield stage
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(str(stage))
        else:  # Python 3.10 has no add_note, but pytest and others show notes
            error.__dict__.setdefault("__notes__", []).append(str(stage))
        raise


@contextmanager
def writable(gradients: StepGradients, config: Config) -> Iterator[StepGradients]:
    """Provide gradients that may be overwritten: copies, if ``keep_gradients`` is set."""
    if not config.keep_gradients:
        yield gradients
        return
    copies = [grad.clone() for grad in gradients.grads]
    with cleaning_up(partial(_set_gradients, gradients.params, gradients.grads)):
        _set_gradients(gradients.params, copies)
        yield gradients._replace(grads=copies)


def without_gradients(params: Sequence[Tensor], step: Callable[[], object]) -> None:
    """Take a step of F while these parameters have no gradient, so that F skips them."""
    if not params:
        step()
        return
    grads = [p.grad for p in params]

    def step_others() -> None:
        _set_gradients(params, [None] * len(params))
        step()

    run_then(step_others, partial(_set_gradients, params, grads))


def _set_gradients(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


class Progress:
    """The updates of a step that is running or has failed.

    A step's M must not enter a statistic twice. Refreshes may be repeated, with the same result.

    Attributes:
        new: Members whose first roots this step has computed.
    """

    def __init__(self) -> None:
        self.new: set[int] = set()
        self._begun: list[tuple[Sequence[Part], Batch]] = []
        self._updated: set[tuple[Factors, int]] = set()

    def begin(self, parts: Sequence[Part], batch: Batch) -> None:
        """Register a batch before its update. ``batch.replaced`` then marks the updated rows."""
        batch.replaced = None
        self._begun.append((parts, batch))

    def failed(self) -> bool:
        """True at the beginning of a step if the previous step is not complete."""
        return bool(self._begun or self._updated)

    def remaining(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield the rows that are not updated yet. Waits for the device."""
        for begun, batch in self._begun:
            if batch.replaced is not None:
                done = zip(rows_of(begun), batch.replaced.tolist(), strict=True)
                self._updated |= {(part.factors, row) for (part, row), new in done if new}
        self._begun.clear()
        for part, row in rows_of(parts):
            if (part.factors, row) not in self._updated:
                yield part.row(row)

    def settle(self) -> None:
        """Forget the updates of a step that is complete."""
        self.new.clear()
        self._begun.clear()
        self._updated.clear()
