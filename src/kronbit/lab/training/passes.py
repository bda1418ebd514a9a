"""Forward and backward: one step's gradients, eagerly or by replaying a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from kronbit.lab.models import logits
from kronbit.lab.precision import autocast
from kronbit.lab.training.determinism import Repeatable

_WARM_UPS = 3


@dataclass(frozen=True)
class Objective:
    """The loss, and how the network is run for it.

    Attributes:
        classifies: Whether a target belongs to a whole example, else to each token.
        amp: ``off``, ``bf16`` or ``fp16``.
        smoothing: Of labels in training.
    """

    classifies: bool
    amp: str
    smoothing: float = 0.0

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        """Logits, in float32."""
        with autocast(x.device.type, self.amp):
            outputs = logits(model, x)
        return outputs.float() if self.classifies else outputs.float().flatten(0, 1)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch in training. Mixed targets are smoothed already."""
        smoothing = 0.0 if y.is_floating_point() else self.smoothing
        target = y if y.is_floating_point() else y.flatten()
        return functional.cross_entropy(self.outputs(model, x), target, label_smoothing=smoothing)

    @torch.no_grad()
    def judge(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """(sum of losses, right answers, answers) of held-out data, on the device."""
        outputs, target = self.outputs(model, x), y.flatten()
        loss = functional.cross_entropy(outputs, target, reduction="sum")
        right = (outputs.argmax(-1) == target).sum()
        return torch.stack([loss.double(), right.double(), torch.full_like(loss, len(target))])


class Eager:
    """The gradients of a step, in one or several parts.

    Args:
        model: The network, wrapped as it runs.
        objective: Its loss.
        optimizer: Whose gradients are cleared.
        micro_batch: Examples per part; ``None`` for all at once.
        scaler: Of fp16 training.
        repeatable: How to get the same gradients every time.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        micro_batch: int | None,
        scaler: torch.amp.GradScaler,
        repeatable: Repeatable,
    ) -> None:
        self._model, self._objective, self._optimizer = model, objective, optimizer
        self._micro_batch, self._scaler, self._repeatable = micro_batch, scaler, repeatable

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Fills the gradients; returns the loss, which is still on the device."""
        return self._repeatable(lambda: self._run(x, y))

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        size = self._micro_batch or len(x)
        parts = list(zip(x.split(size), y.split(size), strict=True))
        losses = []
        for number, (some, target) in enumerate(parts, 1):
            with self._without_exchange(number < len(parts)):
                loss = self._objective.loss(self._model, some, target) * (len(some) / len(x))
                self._scaler.scale(loss).backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def _without_exchange(self, wanted: bool) -> AbstractContextManager[None]:
        """Gradients of parts are summed up here, and exchanged with the last one."""
        if wanted and isinstance(self._model, nn.parallel.DistributedDataParallel):
            return self._model.no_sync()
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(not wanted)
        return nullcontext()


class Captured:
    """The same as one CUDA graph, which is replayed: no launches by the host.

    Inputs are copied to where the graph reads, and gradients stay where it writes them.

    Args:
        model: The network.
        objective: Its loss.
        x: Inputs of the shape of every step.
        y: Targets of the shape of every step.
        repeatable: How to get the same gradients every time.

    Attributes:
        freed_bytes: What the pass frees again as it goes. It stays the graph's own, although
            torch does not count it as allocated.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, x: Tensor, y: Tensor, repeatable: Repeatable
    ) -> None:
        self._model, self._objective = model, objective
        self._x, self._y = x.clone(), y.clone()
        with _unchanged(model):
            repeatable(self._warm_up)
            self._graph, self._loss = repeatable(self._capture)

    def _warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._model.zero_grad()
                self._objective.loss(self._model, self._x, self._y).backward()
        torch.cuda.current_stream().wait_stream(side)
        self._model.zero_grad()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph):
            loss = self._objective.loss(self._model, self._x, self._y)
            loss.backward()
        self.freed_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        return graph, loss.detach()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Fills the gradients; returns the loss, which is still on the device."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss.clone()


def rehearse(model: nn.Module, objective: Objective, x: Tensor, y: Tensor) -> None:
    """A step of a copy: what torch loads and sets up at the first one is no part of a training."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters())
    objective.loss(twin, x, y).backward()
    optimizer.step()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Statistics of batch norm must not count what is only a rehearsal."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, value in kept:
        buffer.copy_(value)
