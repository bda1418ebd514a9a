"""Layers as matrices, and their inputs and output gradients as rows.

A layer is one matrix [W | b], or one per group of channels, with the bias as the column of a
constant input 1. For a batch of examples, x is a row of the input and y a row of the gradient at
the output. The gradient of the matrix is the sum of y xᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer:
    """A module with a matrix [W | b]: ``nn.Linear`` here, other layers in subclasses.

    Args:
        name: Name of the module in the model.
        module: The module.
        weight: W.
        bias: b, or None if it is not trained.

    Attributes:
        sides: (E, outputs, inputs) of E matrices, including the bias.
        matrices: (E, M, N), the shape of the stored matrices.
    """

    # True if the rows of the stored matrix are inputs. Then x belongs to L, and y to R.
    inputs_are_rows = False

    def __init__(self, name: str, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        self.name, self.module, self.weight, self.bias = name, module, weight, bias
        E = module.groups if isinstance(module, nn.Conv2d) else 1
        M, N, column = weight.shape[0] // E, math.prod(weight.shape[1:]), bias is not None
        self.matrices = (E, M + column, N) if self.inputs_are_rows else (E, M, N + column)
        E, M, N = self.matrices
        self.sides = (E, N, M) if self.inputs_are_rows else (E, M, N)

    def inputs(self, x: Tensor, size: int) -> Iterator[Tensor]:
        """Yield rows of the input, (E, examples, positions, inputs), ``size`` bytes at a time.

        A linear layer yields all rows at once, without a copy.
        """
        yield _by_position(x)

    def outputs(self, y: Tensor) -> Tensor:
        """Return rows of the gradient at the output, (E, examples, positions, outputs)."""
        return _by_position(y)

    def join(self, grad: Tensor) -> Tensor:
        """Return the gradient of [W | b], (E, M, N), given the gradient of W."""
        assert self.bias is not None
        E, M, N = self.matrices
        bias = self.bias.grad if self.bias.grad is not None else torch.zeros_like(self.bias)
        if self.inputs_are_rows:
            return torch.cat([grad, bias.unsqueeze(0)]).unsqueeze(0)
        return torch.cat([grad.reshape(E, M, N - 1), bias.view(E, M, 1)], -1)

    def separated(self, joined: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the gradients of W and b, if they exist, each with its part of ``joined``."""
        assert self.bias is not None
        if self.inputs_are_rows:
            weight, bias = joined[0, :-1], joined[0, -1]
        else:
            weight, bias = joined[..., :-1], joined[..., -1]
        for p, part in ((self.weight, weight), (self.bias, bias)):
            if p.grad is not None:
                yield p.grad, part.reshape(p.shape)


class TransposedLinear(Layer):
    """``Conv1D`` of transformers: a linear layer whose weight is stored as (inputs, outputs)."""

    inputs_are_rows = True


class Conv2d(Layer):
    """``nn.Conv2d``: x is a patch of the input, and each group of channels has a matrix."""

    def inputs(self, x: Tensor, size: int) -> Iterator[Tensor]:
        """Yield the patches of the input, a few images at a time."""
        module = self.module
        assert isinstance(module, nn.Conv2d)
        x = x.unsqueeze(0) if x.dim() == 3 else x
        # Pad as the layer does, for padding modes and for padding given by name.
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        shape = module.kernel_size, module.dilation, 0, module.stride
        positions = math.prod(
            (side - d * (k - 1) - 1) // step + 1
            for side, k, d, step in zip(
                x.shape[-2:], module.kernel_size, module.dilation, module.stride, strict=True
            )
        )
        elements = x.shape[1] * math.prod(module.kernel_size) * positions  # of an image's patches
        for piece in x.split(max(1, size // (8 * elements))):
            patches = functional.unfold(piece.float(), *shape)
            yield patches.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)

    def outputs(self, y: Tensor) -> Tensor:
        """Return the gradient at each position of the output."""
        y = y.unsqueeze(0) if y.dim() == 3 else y
        rows: Tensor = y.flatten(2).unflatten(1, (self.sides[0], -1)).permute(1, 0, 3, 2)
        return rows


def _by_position(x: Tensor) -> Tensor:
    """Convert (examples, ..., features) or (features,) to (1, examples, positions, features)."""
    x = x.unsqueeze(0) if x.dim() == 1 else x
    x = x.unsqueeze(1) if x.dim() == 2 else x
    return x.flatten(1, -2).unsqueeze(0)


def _kind_of(module: nn.Module) -> type[Layer] | None:
    """Return the ``Layer`` class of a module, or None if the module has no statistics."""
    if isinstance(module, nn.Linear):
        return Layer
    if isinstance(module, nn.Conv2d):
        return Conv2d
    # Compare names: transformers may not be installed.
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return TransposedLinear if is_conv1d else None


def find_layers(
    model: nn.Module, params: Collection[Tensor]
) -> tuple[dict[Tensor, Layer], dict[Tensor, str]]:
    """Find the layers of parameters by their weights.

    Returns:
        The layers, and the reasons why other weights are left to F.

    Raises:
        ValueError: If a layer does not know its shape yet.
    """
    users: dict[Tensor, list[str]] = {}
    uncalled: set[nn.Module] = set()
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            users.setdefault(p, []).append(name)
        if isinstance(module, nn.MultiheadAttention):
            uncalled.add(module.out_proj)  # attention uses its weight, but does not call it
    wanted = set(params)
    layers: dict[Tensor, Layer] = {}
    reasons: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        kind, weight = _kind_of(module), module._parameters.get("weight")
        if kind is None or weight is None or weight not in wanted:
            continue
        if nn.parameter.is_lazy(weight):
            raise ValueError(f"{name} does not know its shape yet: call the model once first")
        if len(users[weight]) > 1:
            reasons[weight] = f"shared by {', '.join(users[weight])}"
        elif module in uncalled:
            reasons[weight] = "nn.MultiheadAttention does not call it"
        else:
            bias = module._parameters.get("bias")
            # A bias that is frozen alone stays frozen. If its weight is frozen too, both may be
            # trained later.
            frozen = bias is not None and weight.requires_grad and not bias.requires_grad
            trained = bias in wanted and len(users[bias]) == 1 and not frozen
            layers[weight] = kind(name, module, weight, bias if trained else None)
    return layers, reasons
