"""Eva (Zhang, Shi and Li, 2023): K-FAC with factors of rank one.

Everything is collected during the backward pass, where y is known: what is computed once more for
activation checkpointing has no backward pass, and does not count twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kronbit.baselines.rewriter import Rewriter, check_damping, graft, is_number, wide, zeros
from kronbit.factors import Layout
from kronbit.first_order import BaseFactory
from kronbit.statistics.activations import find_layers
from kronbit.statistics.hooks import given_up, hooked
from kronbit.statistics.layers import Layer
from kronbit.warning import warn

# Bytes of a piece of the inputs: they are read once, and not copied, so there is only one.
_ALL_AT_ONCE = 2**62


@dataclass(frozen=True)
class Sums:
    """Sums over the rows that a layer has seen since its gradient was empty.

    Attributes:
        x: Σ x without the constant 1, (E, inputs).
        y: Σ y, (E, outputs).
        rows: How many there were.
    """

    x: Tensor
    y: Tensor
    rows: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.x + other.x, self.y + other.y, self.rows + other.rows)

    def means(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """The mean x, with the constant 1 where there is a bias, and the mean y."""
        x, y = self.x / self.rows, self.y / self.rows
        return (x if layer.bias is None else functional.pad(x, (0, 1), value=1.0)), y


class EVA(Rewriter):
    """Eva around any first-order optimizer: a baseline to compare with, not a recommendation.

    With x the inputs of a layer (with a constant 1 for the bias) and y the gradients at its
    outputs, ā ← β ā + (1 - β) mean(x) and b̄ ← β b̄ + (1 - β) mean(y) at every step, both divided by
    1 - β^t where they are used, so that the first means count in full. The curvature of [W | b] is
    C = (b̄ b̄ᵀ) ⊗ (ā āᵀ) + γ I, and by Sherman and Morrison

        Ĝ = C⁻¹ G = (G - (b̄ᵀ G ā) / (γ + ‖ā‖² ‖b̄‖²) b̄ āᵀ) / γ.

    The first-order optimizer gets G̃ = Ĝ ‖G‖ / ‖Ĝ‖ (over all matrices of a layer together), as
    kronbit's own optimizers do it: step sizes can be compared. Linear layers, 2-d convolutions (one
    matrix per group of channels) and transformers' ``Conv1D`` are preconditioned, all other
    parameters are left to the base.

    The y are those of the loss that is differentiated: if it is a mean over N rows, they have a
    factor 1/N, and γ weighs N² times as much beside ‖b̄‖². The scale of a ``torch.amp.GradScaler``
    is not undone: use bfloat16 or float32. One process only.

    Example::

        opt = EVA(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)

    Args:
        params: A ready optimizer, or parameters, param groups or named parameters.
        base: As for ``kronbit.Shampoo``.
        model: The model that has these parameters. Its layers are watched in training mode and
            where gradients are enabled.
        beta: β. Decay of the means, in [0, 1).
        damping: γ. Above 0.
        **options: The base's own.
    """

    # Hooks stay with the model that has them; what they have seen belongs to a single step.
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
        self._collected: dict[Layer, Sums] = {}
        self._handles: list[RemovableHandle] = []
        self._closed = False
        self._missed = 0
        super().__init__(params, base, **options)  # adds the groups, and hooks with them

    def check(self) -> None:
        """Refuse several processes, and parameters none of which is a layer's weight."""
        if not any(p in self._layers for p in self._params()):
            raise ValueError(
                "none of the parameters is the weight of a linear layer or convolution of model, "
                "so nothing would be preconditioned: give the model that has these parameters"
            )
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if processes > 1:
            raise RuntimeError(
                f"EVA does not average its means over processes, and there are {processes}: their "
                "weights would walk apart. Train in one process, or use kronbit.KFAC"
            )

    def layout(self, p: Tensor) -> Layout:
        """Steps and means of a layer's weight; nothing of other parameters."""
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
        """Add a group to F, and watch the layers of its weights."""
        super().add_param_group(param_group)
        self._watch_layers()

    def _watch_layers(self) -> None:
        """Hooks on the layers that are optimized, and on no others."""
        for handle in self._handles:
            handle.remove()
        layers = [self._layers[p] for p in self._params() if p in self._layers]
        self._handles = hooked(self, [] if self._closed else layers)

    def close(self) -> None:
        """Remove the hooks from the model: means stay as they are from now on."""
        self._closed = True
        self._watch_layers()
        self._collected.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them what was collected for the next step."""
        self._collected.clear()
        super().zero_grad(set_to_none)

    def watch(self, layer: Layer, x: Tensor, output: Any) -> None:
        """Wait for the gradient at the output of a layer; of x, only the sum is kept."""
        if given_up(layer):
            self._collected.pop(layer, None)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._collect, layer, _sum_of_inputs(layer, x)))

    @torch.no_grad()
    def _collect(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        rows = layer.kind.outputs(layer.module, y)
        sums = Sums(x, rows.sum((1, 2), dtype=x.dtype), rows.shape[1] * rows.shape[2])
        before = self._collected.get(layer)
        self._collected[layer] = sums if before is None else before + sums

    # ------------------------------------------------------------------------------- rewriting

    def rewrite(self) -> None:
        """ā, b̄ ← β ā + (1 - β) mean(x), β b̄ + (1 - β) mean(y); G ← G̃."""
        present = [p for p in self._params() if p.grad is not None]
        layers = [self._layers[p] for p in present if p in self._layers]
        self._prepare(p for layer in layers for p in (layer.weight, layer.bias) if p is not None)
        collected, self._collected = self._collected, {}
        if not layers:
            return
        means = {
            layer: collected[layer].means(layer)
            for layer in layers
            if layer in collected and collected[layer].rows
        }
        if missed := [layer for layer in layers if layer not in means]:
            self._note_missed(missed)
        finite = self._finite([mean for both in means.values() for mean in both])
        for layer in layers:
            here = finite.to(layer.weight.device)
            if layer in means:
                self._update(layer, *means[layer], here)
            if self.state.get(layer.weight):
                self._precondition(layer, here)

    def _note_missed(self, layers: list[Layer]) -> None:
        if not self._missed and not self._closed:
            warn(
                f"{len(layers)} layer(s), {layers[0].name!r} first, have a gradient, but were not "
                "called in training mode since the last step: their means stay as they are. "
                "Compiled models do not call hooks"
            )
        self._missed += len(layers)

    def _update(self, layer: Layer, x: Tensor, y: Tensor, finite: Tensor) -> None:
        """ā and b̄, and how many means they hold."""
        weight = layer.weight
        if not self.state[weight]:
            self.state[weight] = zeros(self.layout(weight), weight.device)
        own = self.state[weight]
        own["step"] += finite
        for mean, new in ((own["input_mean"], x), (own["output_mean"], y)):
            mean.copy_(torch.where(finite, torch.lerp(new, mean, self.beta), mean))

    def _precondition(self, layer: Layer, finite: Tensor) -> None:
        """G̃ in the place of G, where means are known and everything is finite."""
        grad, own = layer.weight.grad, self.state[layer.weight]
        assert grad is not None
        t = own["step"]
        a, b = (own[name] / (1 - self.beta ** t.double()) for name in ("input_mean", "output_mean"))
        left, right = (a, b) if layer.kind.inputs_are_rows else (b, a)
        G = grad if layer.bias is None else layer.join(grad)
        G = G.reshape(layer.matrices).to(a.dtype)
        Ghat = inverse_times(G, left, right, self.damping)
        G = torch.where(finite & (t > 0), graft(G, Ghat, grad.dtype), G)
        if layer.bias is None:
            grad.copy_(G.reshape(grad.shape))
            return
        for part, written in layer.separated(G):
            part.copy_(written)

    # -------------------------------------------------------- checkpoints, reports and copies

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint, bit for bit; what was collected until now is dropped.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            ValueError: If the checkpoint does not fit; nothing has been changed then.
        """
        super().load_state_dict(state_dict)
        self._collected.clear()
        self._missed = 0

    def diagnostics(self) -> dict[str, Any]:
        """Counters, and how often a layer had a gradient but no means. Waits for the device."""
        return {**super().diagnostics(), "missed_statistics": self._missed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._collected, self._handles = {}, []
        self._watch_layers()


def inverse_times(G: Tensor, left: Tensor, right: Tensor, damping: float) -> Tensor:
    """((u uᵀ) ⊗ (v vᵀ) + γ I)⁻¹ G of each matrix, by Sherman and Morrison.

    Args:
        G: (E, M, N).
        left: u, (E, M).
        right: v, (E, N).
        damping: γ.
    """
    u, v = left.unsqueeze(-1), right.unsqueeze(-1)
    squares = (u.mT @ u) * (v.mT @ v)
    return (G - (u.mT @ G @ v) / (damping + squares) * u @ v.mT) / damping


@torch.no_grad()
def _sum_of_inputs(layer: Layer, x: Tensor) -> Tensor:
    """Σ x, (E, inputs)."""
    dtype = wide(layer.weight.dtype)
    if isinstance(layer.module, nn.Conv2d) and x.dim() == 4:
        # Patches are linear in the image: those of the sum of all images are the sums of theirs.
        x = x.sum(0, keepdim=True, dtype=dtype)
    (rows,) = layer.kind.inputs(layer.module, x.detach(), _ALL_AT_ONCE)
    return rows.sum((1, 2), dtype=dtype)
