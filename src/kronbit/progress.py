"""What a step has updated so far, in case that it fails and is taken again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kronbit.batches import Part, Portion, rows_of
from kronbit.factors import Factors


class Progress:
    """The updates of a step that is not through, or has failed.

    Statistics must not take a step's M twice. Refreshes need no such care: the second time they
    find what they found the first time.

    Attributes:
        new: Members whose first roots the step has found.
    """

    def __init__(self) -> None:
        self.new: set[int] = set()
        self._begun: list[Portion] = []
        self._updated: set[tuple[Factors, int]] = set()

    def begin(self, portion: Portion) -> None:
        """Note what is about to be updated; its batch will tell whether it was."""
        portion.batch.replaced = None
        self._begun.append(portion)

    def failed(self) -> bool:
        """Whether, when a step begins, the one before it is not through."""
        return bool(self._begun or self._updated)

    def left(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The rows that are not updated yet. Waits for the device."""
        for begun, batch, _ in self._begun:
            if batch.replaced is not None:
                done = zip(rows_of(begun), batch.replaced.tolist(), strict=True)
                self._updated |= {(part.factors, row) for (part, row), new in done if new}
        self._begun.clear()
        for part, row in rows_of(parts):
            if (part.factors, row) not in self._updated:
                yield part.row(row)

    def settle(self) -> None:
        """The step is through: what it has done counts, and the next one does its own."""
        self.new.clear()
        self._begun.clear()
        self._updated.clear()
