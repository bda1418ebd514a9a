"""Memory of a forward and a backward pass: counted on the meta device, or measured on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kronbit.lab.models import logits
from kronbit.lab.plan.gpu_behaviour import GPUEmulation, expose_torch_functions
from kronbit.lab.precision import AMP, autocast


@dataclass(frozen=True)
class Inputs:
    """What a network reads.

    Attributes:
        shape: Of one example.
        tokens: Whether they are whole numbers.
    """

    shape: tuple[int, ...]
    tokens: bool

    def batch(self, size: int, dtype: torch.dtype) -> Tensor:
        """A batch on the current default device; its values are of no meaning."""
        return torch.zeros(size, *self.shape, dtype=torch.int64 if self.tokens else dtype)


@dataclass(frozen=True)
class Passes:
    """How the network is run.

    Attributes:
        inputs: What it reads.
        amp: ``off``, ``bf16`` or ``fp16``: autocast of the forward pass.
        repeated: Whether gradients of several passes are summed up before a step.
    """

    inputs: Inputs
    amp: str = "off"
    repeated: bool = False

    def loss(self, model: nn.Module, batch: int) -> Tensor:
        """Cross entropy of float32 logits, one answer for each row of them."""
        x = self.inputs.batch(batch, next(model.parameters()).dtype)
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):  # reads targets as well
            loss: Tensor = model(input_ids=x, labels=x).loss
            return loss
        rows = logits(model, x).float().flatten(0, -2)
        return functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64))


@dataclass(frozen=True)
class Trace:
    """Bytes held besides parameters and buffers.

    Attributes:
        saved: Between the forward and the backward pass: what autograd has saved.
        curve: After each operation of both, gradients included as they come.
    """

    saved: int
    curve: Tensor

    @property
    def peak(self) -> int:
        """The fullest moment."""
        return int(self.curve.max())


class _Held(TorchDispatchMode):
    """Counts the storages that are alive, each once.

    Args:
        known: Tensors that do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.curve: list[int] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any] | None]] = {
            tensor.untyped_storage()._cdata: (0, None) for tensor in known
        }

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._count(tensor.untyped_storage())
        self.curve.append(self.bytes)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            gone = weakref.ref(storage, lambda _: self._forget(key))
            self._alive[key] = storage.nbytes(), gone
            self.bytes += storage.nbytes()

    def _forget(self, key: int) -> None:
        self.bytes -= self._alive.pop(key)[0]


def trace(model: nn.Module, passes: Passes, batch: int) -> Trace:
    """Count what forward and backward hold, on the meta device.

    Args:
        model: On the meta device.
        passes: How it is run.
        batch: Examples per pass.

    Raises:
        Exception: Whatever the model raises where it cannot run without values.
    """
    held = _Held([*model.parameters(), *model.buffers()])
    saved = 0
    model.train()
    try:
        with expose_torch_functions(), torch.device("meta"), held:
            for _ in range(1 + passes.repeated):
                with GPUEmulation(AMP[passes.amp]) as behaviour:
                    loss = passes.loss(model, batch)
                    behaviour.end_forward_pass()
                    saved = saved or held.bytes
                    torch.autograd.backward(loss)
                    del loss
    finally:
        model.zero_grad(set_to_none=True)
    return Trace(saved, torch.tensor(held.curve, device="cpu"))


@dataclass(frozen=True)
class Estimate:
    """The memory of both passes at any batch, from counts at two of them.

    Attributes:
        batch: Of the first count.
        first: At this batch.
        second: At twice the batch.
    """

    batch: int
    first: Trace
    second: Trace

    def peak_at(self, batch: int) -> int:
        """The fullest moment at another batch: each operation's memory is linear in the batch."""
        one, two = self.first.curve, self.second.curve
        if len(one) != len(two):  # the network runs otherwise at another batch
            return self.first.peak * batch // self.batch
        return int((one + (two - one) * (batch - self.batch) // self.batch).max())


def estimate(model: nn.Module, passes: Passes, batch: int) -> Estimate:
    """Count at two batches; see ``trace``."""
    return Estimate(batch, trace(model, passes, batch), trace(model, passes, 2 * batch))


def measure(build: Callable[[], nn.Module], passes: Passes, batch: int) -> int:
    """Run both passes on the current GPU.

    Args:
        build: Makes the network on the default device, with weights.
        passes: How it is run.
        batch: Examples per pass.

    Returns:
        The most bytes that were allocated besides parameters and buffers.

    Raises:
        torch.OutOfMemoryError: If the GPU is too small.
    """
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = build().train()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(1 + passes.repeated):
            with autocast("cuda", passes.amp):
                loss = passes.loss(model, batch)
            loss.backward()
            del loss
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
