"""Hooks on layers, and when what they have seen is of no use any more."""

from __future__ import annotations

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


class _Hook:
    """Watches one layer for one watcher: a copy of the layer has no statistics of its own."""

    def __init__(self, watcher: Watcher, layer: Layer) -> None:
        self._watcher, self._layer = watcher, layer

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        wanted = module is self._layer.module and module.training
        if wanted and torch.is_grad_enabled() and self._layer.weight.requires_grad:
            x = args[0] if args else next(iter(kwargs.values()))
            self._watcher.watch(self._layer, x, output)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _ignore(*_: Any) -> None:
    """A hook that does nothing."""


def _no_hook() -> Callable[..., None]:
    """What stands for a hook in a pickled model."""
    return _ignore
