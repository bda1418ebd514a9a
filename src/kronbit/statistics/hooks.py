"""Hooks on layers, and when what they have seen is of no use any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kronbit.statistics.layers import Layer


class Watcher(Protocol):
    """Whoever wants to see what goes in and out of layers."""

    def watch(self, layer: Layer, x: Tensor, output: Any) -> None:
        """Look at a call of a layer in training mode, where gradients are enabled."""


def hooked(watcher: Watcher, layers: Iterable[Layer]) -> list[RemovableHandle]:
    """Let a watcher see calls of layers; the handles end that."""
    return [
        layer.module.register_forward_hook(_Hook(watcher, layer), with_kwargs=True)
        for layer in layers
    ]


def given_up(layer: Layer) -> bool:
    """Whether, at a call, the gradient is gone that earlier calls belonged to.

    In the middle of a backward pass, where checkpointing calls a layer once more, the gradient may
    not have arrived yet.
    """
    return layer.weight.grad is None and torch._C._current_graph_task_id() == -1


class Kept:
    """An input that is kept for the backward pass as autograd keeps its own.

    So checkpointing can drop it and compute it once more, and offloading can move it.

    Args:
        x: The input.
    """

    def __init__(self, x: Tensor) -> None:
        keep: Callable[..., Tensor] = _Keep.apply
        # Its node saves the input, and lives as long as it does.
        self._output = keep(torch.empty(0, requires_grad=True), x.detach())

    def get(self) -> Tensor | None:
        """The input; ``None`` if it was written to since: the layer has seen something else."""
        try:
            (x,) = self._output.grad_fn.saved_tensors  # type: ignore[union-attr]
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                return None
            raise
        found: Tensor = x
        return found


class _Keep(torch.autograd.Function):
    """A node of no graph, which only holds something."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Hook:
    """Watches one layer for one watcher: on a copy of the layer there is nothing of it."""

    def __init__(self, watcher: Watcher, layer: Layer) -> None:
        self._watcher, self._layer = weakref.ref(watcher), layer  # it may outlive its optimizer

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        watcher, weight = self._watcher(), self._layer.weight
        # In a functional call, or pruned, a layer may have another weight.
        own = module is self._layer.module and module._parameters.get("weight") is weight
        if watcher is None or not own or not module.training or not weight.requires_grad:
            return
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            x = args[0] if args else next(iter(kwargs.values()))
            watcher.watch(self._layer, x, output)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Callable[..., None]:
        return _ignore

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _ignore(*_: Any) -> None:
    """A hook that does nothing."""


def _no_hook() -> Callable[..., None]:
    """What stands for a hook in a pickled model."""
    return _ignore
