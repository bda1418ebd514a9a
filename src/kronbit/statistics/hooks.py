"""Hooks that observe the inputs and outputs of layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kronbit.statistics.layers import Layer

# Receives a layer, its input and its output when it is called in training mode with gradients.
Watch: TypeAlias = Callable[[Layer, Tensor, Any], None]


def register_hooks(watch: Watch, layers: Iterable[Layer]) -> list[RemovableHandle]:
    """Register hooks that report calls of layers to a method; return their handles."""
    return [
        layer.module.register_forward_hook(_Hook(watch, layer), with_kwargs=True)
        for layer in layers
    ]


def was_reset(layer: Layer) -> bool:
    """True if the gradient of the layer's earlier calls has been reset. Called by hooks.

    False within a backward pass, in which checkpointing repeats calls: the gradient may not have
    been computed yet.
    """
    return layer.weight.grad is None and torch._C._current_graph_task_id() == -1


class SavedInput:
    """An input that is saved for the backward pass as autograd saves tensors.

    Checkpointing can therefore drop and recompute it, and offloading can move it.
    """

    def __init__(self, x: Tensor) -> None:
        save: Callable[..., Tensor] = _Save.apply
        # The output's node saves the input, and lives as long as the output.
        self._output = save(torch.empty(0, requires_grad=True), x.detach())

    def get(self) -> Tensor | None:
        """Return the input, or None if it was changed in place after the call."""
        try:
            (x,) = self._output.grad_fn.saved_tensors  # type: ignore[union-attr]
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                return None
            raise
        saved: Tensor = x
        return saved


class _Save(torch.autograd.Function):
    """A node outside of the model's graph that saves a tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Hook:
    """Reports calls of a layer to a method. Copies of the layer do not report."""

    def __init__(self, watch: Watch, layer: Layer) -> None:
        # Weak, because the model may outlive the optimizer.
        self._watch, self._layer = weakref.WeakMethod(watch), layer

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        watch, weight = self._watch(), self._layer.weight
        # A functional call or pruning may give the layer another weight.
        same = module is self._layer.module and module._parameters.get("weight") is weight
        if watch is None or not same or not module.training or not weight.requires_grad:
            return
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            x = args[0] if args else next(iter(kwargs.values()))
            watch(self._layer, x, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_ignore,)  # in a copied or pickled model


def _ignore(*_: Any) -> None:
    """Do nothing, in place of a hook."""
