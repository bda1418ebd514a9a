"""Switch between training and evaluation, where a schedule-free F has different weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit.lab.training.passes import Objective

_RECALIBRATED = 50  # batches for the statistics of batch norm in evaluation


class Modes:
    """Switches a network and its optimizer.

    Args:
        model: The network.
        optimizer: Its optimizer; a schedule-free one has ``train`` and ``eval``.
        objective: Runs the network.
        batches: Training data by step, for schedule-free runs. Statistics of batch norm are
            recomputed from it before an evaluation, and restored after it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        batches: Callable[[int], tuple[Tensor, Tensor]] | None,
    ) -> None:
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._batches = batches
        self._norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
        self._kept: list[Tensor] = []

    def train(self) -> None:
        """Prepare for training."""
        getattr(self._optimizer, "train", lambda: None)()
        self._model.train()
        for buffer, value in zip(self._statistics(), self._kept, strict=False):
            buffer.copy_(value)
        self._kept = []

    def evaluate(self, step: int) -> None:
        """Prepare for held-out data after ``step`` steps."""
        getattr(self._optimizer, "eval", lambda: None)()
        self._model.eval()
        if self._batches is None or not self._norms:
            return
        self._kept = [buffer.clone() for buffer in self._statistics()]
        for norm in self._norms:
            norm.train()
        with torch.no_grad():
            for number in range(_RECALIBRATED):
                self._objective.outputs(self._model, self._batches(step + number)[0])
        self._model.eval()

    def _statistics(self) -> list[Tensor]:
        return [buffer for norm in self._norms for buffer in norm.buffers()]
