"""Eva (Zhang, Shi and Li, 2023): K-FAC with factors of rank one.

Means are collected in the backward pass, where y is known. The forward pass that activation
checkpointing repeats is therefore not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kronbit.base import BaseFactory
from kronbit.baselines.rewriter import Rewriter, check_damping, graft, is_number, wide
from kronbit.factors import Layout
from kronbit.messages import warn
from kronbit.statistics.hooks import register_hooks, was_reset
from kronbit.statistics.layers import Layer, find_layers


class EVA(Rewriter):
    """Eva around any first-order optimizer: a baseline to compare with, not a recommendation.

    Let x be the inputs of a layer, with a constant 1 for the bias, and y the gradients at its
    outputs. Every step updates ā ← β ā + (1 - β) mean(x) and b̄ ← β b̄ + (1 - β) mean(y). Both are
    divided by 1 - β^t when they are used, as they start at zero. The curvature of [W | b] is
    C = (b̄ b̄ᵀ) ⊗ (ā āᵀ) + γ I, and the Sherman-Morrison formula gives

        Ĝ = C⁻¹ G = (G - (b̄ᵀ G ā) / (γ + ‖ā‖² ‖b̄‖²) b̄ āᵀ) / γ.

    The first-order optimizer receives G̃ = Ĝ ‖G‖ / ‖Ĝ‖, with norms over all matrices of a layer. All
    optimizers of kronbit graft, so that step sizes are comparable. Linear layers, 2-d convolutions
    (one matrix per group of channels) and ``Conv1D`` of transformers are preconditioned. All other
    parameters are left to the base.

    y depends on the scale of the loss. If the loss is a mean over N terms, y has a factor 1/N,
    and γ weighs N² times as much relative to ‖b̄‖². The scale of a ``torch.amp.GradScaler`` is not
    removed: use bfloat16 or float32. EVA runs in one process only.

    Example::

        opt = EVA(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)

    Args:
        params: An optimizer, or parameters, param groups or named parameters.
        base: First-order optimizer, as for ``kronbit.Shampoo``.
        model: The model with these parameters. Its layers are observed in training mode while
            gradients are enabled.
        beta: Decay β of the means, in [0, 1).
        damping: Damping γ > 0.
        **options: Options of the base.
    """

    # Hooks belong to the model, and collected sums to a single step: neither is copied.
    _pickled: ClassVar[tuple[str, ...]] = ("beta", "damping", "_layers", "_closed", "_missed")

    def __init__(
        self,
        params: Optimizer | Iterable[Any] | None = None,
        base: str | BaseFactory | Optimizer | None = None,
        *,
        model: nn.Module,
        beta: float = 0.95,
        damping: float = 0.03,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
        if not is_number(beta) or not 0 <= beta < 1:
            raise ValueError(f"beta must be a number in [0, 1); got {beta!r}")
        check_damping(damping)
        self.beta, self.damping = beta, damping
        self._layers = find_layers(model, set(model.parameters()))[0]
        # Σ x, Σ y and the number of rows of each layer since its gradient was reset.
        self._collected: dict[Layer, tuple[Tensor, Tensor, int]] = {}
        self._handles: list[RemovableHandle] = []
        self._closed = False
        self._missed = 0
        super().__init__(params, base, **options)  # adds the param groups, which registers hooks

    def check(self) -> None:
        """Require a single process, and a parameter that is the weight of a layer."""
        if not any(p in self._layers for p in self._params()):
            raise ValueError(
                "none of the parameters is the weight of a linear layer or convolution of model, "
                "so nothing would be preconditioned: pass the model that has these parameters"
            )
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if processes > 1:
            raise RuntimeError(
                f"EVA does not average its means over processes, and there are {processes}: their "
                "weights would diverge. Train in one process, or use kronbit.KFAC"
            )

    def layout(self, p: Tensor) -> Layout:
        """Return the layout of step count and means for a layer's weight; else an empty layout."""
        layer = self._layers.get(p)
        if layer is None:
            return {}
        E, outputs, inputs = layer.sides
        return {
            "step": ((), torch.int64),
            "input_mean": ((E, inputs), wide(p.dtype)),
            "output_mean": ((E, outputs), wide(p.dtype)),
        }

    # ------------------------------------------------------------------------------ collecting

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to F, and register hooks on the layers of its weights."""
        super().add_param_group(param_group)
        self._watch_layers()

    def _watch_layers(self) -> None:
        """Register hooks on the layers whose weights are optimized, and remove all others."""
        for handle in self._handles:
            handle.remove()
        layers = [self._layers[p] for p in self._params() if p in self._layers]
        self._handles = register_hooks(self.watch, [] if self._closed else layers)

    def close(self) -> None:
        """Remove the hooks from the model. The means no longer change."""
        self._closed = True
        self._watch_layers()
        self._collected.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and the sums that were collected with them."""
        self._collected.clear()
        super().zero_grad(set_to_none)

    def watch(self, layer: Layer, x: Tensor, output: Any) -> None:
        """Sum x, and register a hook for the gradient at the layer's output."""
        if was_reset(layer):
            self._collected.pop(layer, None)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._collect, layer, _sum_of_inputs(layer, x)))

    @torch.no_grad()
    def _collect(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        rows = layer.outputs(y)
        count = rows.shape[1] * rows.shape[2]
        if layer.bias is not None:
            x = functional.pad(x, (0, 1), value=count)
        before: Any = self._collected.get(layer, (0, 0, 0))
        y = rows.sum((1, 2), dtype=x.dtype)
        self._collected[layer] = before[0] + x, before[1] + y, before[2] + count

    # ------------------------------------------------------------------------------- rewriting

    def rewrite(self) -> None:
        """Update ā and b̄ with the collected means, and replace G by G̃."""
        present = [p for p in self._params() if p.grad is not None and p in self._layers]
        layers = list(dict.fromkeys(self._layers[p] for p in present))  # torch allows repetitions
        self._prepare(p for layer in layers for p in (layer.weight, layer.bias) if p is not None)
        collected, self._collected = self._collected, {}
        if not layers:
            return
        means = {
            layer: (x / count, y / count)
            for layer, (x, y, count) in collected.items()
            if count and layer in layers
        }
        missed = [layer for layer in layers if layer not in means]
        if missed and not self._missed and not self._closed:
            warn(
                f"{len(missed)} layer(s), such as {missed[0].name!r}, have a gradient, but were "
                "not called in training mode since the last step: their means are not updated. "
                "Compiled models do not call hooks: do not compile these layers"
            )
        self._missed += len(missed)
        finite = self._finite([mean for both in means.values() for mean in both])
        for layer in layers:
            here = finite.to(layer.weight.device)
            if layer in means:
                self._update(layer, *means[layer], here)
            if self.state.get(layer.weight):
                self._precondition(layer, here)

    def _update(self, layer: Layer, x: Tensor, y: Tensor, finite: Tensor) -> None:
        """Update ā, b̄ and the number of means in them."""
        state = self._started(layer.weight)
        state["step"] += finite
        for mean, new in ((state["input_mean"], x), (state["output_mean"], y)):
            mean.copy_(torch.where(finite, torch.lerp(new, mean, self.beta), mean))

    def _precondition(self, layer: Layer, finite: Tensor) -> None:
        """Replace G by G̃ if the layer has means and everything is finite."""
        grad, state = layer.weight.grad, self.state[layer.weight]
        assert grad is not None
        t = state["step"]
        started = 1 - self.beta ** t.double()
        a, b = (state[name].unsqueeze(-1) / started for name in ("input_mean", "output_mean"))
        u, v = (a, b) if layer.inputs_are_rows else (b, a)
        G = grad if layer.bias is None else layer.join(grad)
        G = G.reshape(layer.matrices).to(a.dtype)
        # The Sherman-Morrison formula gives ((u uᵀ) ⊗ (v vᵀ) + γ I)⁻¹ G for each matrix.
        squares = (u.mT @ u) * (v.mT @ v)
        Ghat = (G - (u.mT @ G @ v) / (self.damping + squares) * u @ v.mT) / self.damping
        G = torch.where(finite & (t > 0), graft(G, Ghat, grad.dtype), G)
        if layer.bias is None:
            grad.copy_(G.reshape(grad.shape))
            return
        for part, written in layer.separated(G):
            part.copy_(written)

    # -------------------------------------------------------- checkpoints, reports and copies

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint exactly, and drop collected sums.

        Raises:
            ValueError: If an entry is missing or does not match. The optimizer is unchanged then.
        """
        super().load_state_dict(state_dict)
        self._collected.clear()
        self._missed = 0

    def diagnostics(self) -> dict[str, Any]:
        """Return counters, also of layers without new means. Waits for the device."""
        return {**super().diagnostics(), "missed_statistics": self._missed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._collected, self._handles = {}, []
        self._watch_layers()


@torch.no_grad()
def _sum_of_inputs(layer: Layer, x: Tensor) -> Tensor:
    """Return Σ x over all rows, (E, inputs)."""
    dtype = wide(layer.weight.dtype)
    if isinstance(layer.module, nn.Conv2d) and x.dim() == 4:
        # Patches are linear in the image, so the images can be summed first.
        x = x.sum(0, keepdim=True, dtype=dtype)
    # No limit on the bytes of a piece: the inputs are not copied, so one piece holds all.
    (rows,) = layer.inputs(x.detach(), 2**62)
    return rows.sum((1, 2), dtype=dtype)
