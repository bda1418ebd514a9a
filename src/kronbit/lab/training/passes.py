"""The gradients of a step, computed eagerly or by a CUDA graph."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from kronbit.lab.errors import one_line
from kronbit.lab.models import logits
from kronbit.lab.precision import autocast

T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """The loss of a network."""

    classifies: bool  # True if an example has one target, False if each token has one
    amp: str  # autocast: off, bf16 or fp16
    smoothing: float = 0.0  # of labels, in training

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the logits in float32."""
        with autocast(x.device.type, self.amp):
            outputs = logits(model, x)
        return outputs.float() if self.classifies else outputs.float().flatten(0, 1)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a training batch. Mixed targets are smoothed already."""
        outputs = self.outputs(model, x)
        if y.is_floating_point():
            return functional.cross_entropy(outputs, y)
        return functional.cross_entropy(outputs, y.flatten(), label_smoothing=self.smoothing)

    @torch.no_grad()
    def judge(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return (sum of losses, correct answers, answers) for held-out data, on the device."""
        outputs, target = self.outputs(model, x), y.flatten()
        loss = functional.cross_entropy(outputs, target, reduction="sum")
        right = (outputs.argmax(-1) == target).sum()
        return torch.stack([loss.double(), right.double(), torch.full_like(loss, len(target))])


class Repeatable:
    """Runs passes on a GPU with deterministic algorithms, if wanted. CPU algorithms always are.

    A resumed run therefore equals an uninterrupted one bit for bit. The setting holds during the
    passes only: the optimizer is deterministic without it.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self._wanted = wanted and device.type == "cuda"
        if self._wanted:
            # cuBLAS needs this to be deterministic, and reads it when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def __call__(self, passes: Callable[[], T]) -> T:
        """Run passes; repeat without the setting if an operation has no deterministic algorithm."""
        if not self._wanted:
            return passes()
        settings: Any = torch.utils.deterministic
        before = torch.are_deterministic_algorithms_enabled()
        filled = settings.fill_uninitialized_memory
        settings.fill_uninitialized_memory = False  # it takes time, and no result depends on it
        torch.use_deterministic_algorithms(True)
        try:
            return passes()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            reason = one_line(error).split(". ")[0]
        finally:
            torch.use_deterministic_algorithms(before)
            settings.fill_uninitialized_memory = filled
        self._wanted = False
        warnings.warn(f"a resumed run will not be equal bit for bit: {reason}", stacklevel=2)
        return passes()


@dataclass(frozen=True)
class Eager:
    """Computes the gradients of a step, in one or several passes."""

    model: nn.Module  # with its wrappers (DDP, FSDP, compiled)
    objective: Objective
    optimizer: torch.optim.Optimizer  # clears the gradients
    micro_batch: int | None  # examples per pass; None for the whole batch
    scaler: torch.amp.GradScaler
    repeatable: Repeatable

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradients; return the loss as a tensor on the device."""
        return self.repeatable(lambda: self._run(x, y))

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        size = self.micro_batch or len(x)
        parts = list(zip(x.split(size), y.split(size), strict=True))
        losses = []
        for number, (some, target) in enumerate(parts, 1):
            with self._without_exchange(number < len(parts)):
                loss = self.objective.loss(self.model, some, target) * (len(some) / len(x))
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def _without_exchange(self, wanted: bool) -> AbstractContextManager[None]:
        """Accumulate gradients locally; the last pass exchanges them with the other ranks."""
        if wanted and isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not wanted)
        return nullcontext()


class Captured:
    """Computes the gradients of a step by replaying a CUDA graph.

    ``x`` and ``y`` have the shapes of every step: inputs are copied to those of the graph, and
    gradients stay in the tensors the graph writes to.

    Attributes:
        freed_bytes: Bytes that the passes allocate and free. The graph keeps them, although torch
            does not count them as allocated.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, x: Tensor, y: Tensor, repeatable: Repeatable
    ) -> None:
        self._model, self._objective = model, objective
        self._x, self._y = x.clone(), y.clone()
        with unchanged_buffers(model):
            repeatable(self._warm_up)
            self._graph, self._loss = repeatable(self._capture)

    def _warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
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
        """Compute the gradients; return the loss as a tensor on the device."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss.clone()


def rehearse(model: nn.Module, objective: Objective, x: Tensor, y: Tensor) -> None:
    """Run a step on a copy, so that torch's one-time initialisation is not measured."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters())
    objective.loss(twin, x, y).backward()
    optimizer.step()


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, such as statistics of batch norm, after the body."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, value in kept:
        buffer.copy_(value)
