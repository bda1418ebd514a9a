"""Memory of a forward and a backward pass, counted on the meta device or measured on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
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
class Passes:
    """The forward and backward passes of a step."""

    shape: tuple[int, ...]  # of one example
    tokens: bool  # the inputs are integers
    amp: str = "off"
    repeated: bool = False  # a step accumulates gradients of several passes

    def loss(self, model: nn.Module, batch: int) -> Tensor:
        """Return the cross entropy of the logits in float32, with one target per row."""
        dtype = torch.int64 if self.tokens else next(model.parameters()).dtype
        x = torch.zeros(batch, *self.shape, dtype=dtype)
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):  # needs targets as well
            loss: Tensor = model(input_ids=x, labels=x).loss
            return loss
        rows = logits(model, x).float().flatten(0, -2)
        return functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64))


@dataclass(frozen=True)
class Trace:
    """Bytes allocated besides parameters and buffers."""

    saved: int  # held by autograd between the forward and the backward pass
    curve: Tensor  # after each operation of both passes, gradients included

    @property
    def peak(self) -> int:
        """The maximum of the curve."""
        return int(self.curve.max())


class _AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of all live storages on the meta device, except those of known tensors."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.curve: list[int] = []
        self._alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._alive:
                    self._alive.add(key)
                    self.bytes += size
                    weakref.finalize(storage, self._forget, key, size)
        self.curve.append(self.bytes)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self.bytes -= size


def trace(model: nn.Module, passes: Passes, batch: int) -> Trace:
    """Count the bytes that both passes of a batch allocate, for a model on the meta device.

    Any error may occur if the model depends on values, which the meta device does not have.
    """
    allocated = _AllocatedBytes([*model.parameters(), *model.buffers()])
    saved = 0
    model.train()
    try:
        with expose_torch_functions(), torch.device("meta"), allocated:
            for _ in range(1 + passes.repeated):
                with GPUEmulation(AMP[passes.amp]) as behaviour:
                    loss = passes.loss(model, batch)
                    behaviour.end_forward_pass()
                    saved = saved or allocated.bytes
                    torch.autograd.backward(loss)
                    del loss
    finally:
        model.zero_grad(set_to_none=True)
    return Trace(saved, torch.tensor(allocated.curve, device="cpu"))


class Estimate:
    """Memory of both passes at any batch size, extrapolated from ``batch`` and twice ``batch``."""

    def __init__(self, model: nn.Module, passes: Passes, batch: int) -> None:
        self.batch = batch
        self.first, self.second = (trace(model, passes, size) for size in (batch, 2 * batch))

    def peak_at(self, batch: int) -> int:
        """Return the peak at another batch size; memory at each operation is linear in it."""
        one, two = self.first.curve, self.second.curve
        if len(one) != len(two):  # the operations depend on the batch size
            return self.first.peak * batch // self.batch
        return int((one + (two - one) * (batch - self.batch) // self.batch).max())


def measure(build: Callable[[], nn.Module], passes: Passes, batch: int) -> int:
    """Run both passes on the current GPU and return the peak of allocated bytes.

    Parameters and buffers do not count. ``build`` makes the network on the default device.
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
