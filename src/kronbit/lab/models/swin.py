"""Swin-Tiny: attention within windows, which are shifted in every second block."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronbit.lab.errors import LabError
from kronbit.lab.models import transformer

WIDTH, STAGES = 96, ((2, 3), (2, 6), (6, 12), (2, 24))  # (blocks, heads); the width doubles

constant = partial(nn.Buffer, persistent=False)  # a tensor that is not in the state dict


class Gather(torch.autograd.Function):
    """x[:, index] for x (b, tokens, width), with a gather as its backward pass.

    Autograd would use a scatter-add, although no two gradients belong to the same token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """Gather tokens."""
        ctx.save_for_backward(inverse)
        return x.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gather the gradients by the inverse permutation."""
        (inverse,) = ctx.saved_tensors
        return grad.index_select(1, inverse), None, None


def gather(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return x[:, index]; ``inverse`` is the position of each token in the result."""
    gathered: Tensor = Gather.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return gathered


def windows(image: Tensor, size: int) -> Tensor:
    """Split an image into windows: (h, w) -> (windows, size²)."""
    h, w = image.shape
    return image.view(h // size, size, w // size, size).transpose(1, 2).reshape(-1, size * size)


class WindowAttention(transformer.Attention):
    """Attention within windows, with a learned bias for each offset between two tokens.

    Inputs and outputs have the order of the image. As in timm, a window is at most as large as the
    image and is not shifted if it covers the image; the image is first shifted, then padded.

    Args:
        width: Width of a token.
        heads: Number of heads.
        side: Side of the image, in tokens.
        window: Side of a window.
        shifted: True to shift windows by half their side.
    """

    def __init__(self, width: int, heads: int, side: int, window: int, shifted: bool) -> None:
        size = min(window, side)
        reach = 2 * size - 1
        bias = transformer.table(reach**2, heads)
        super().__init__(width, heads, size**2)
        self.bias = bias
        self.whole = side == size
        shift = size // 2 if shifted and not self.whole else 0
        padding = -side % size
        place = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        offset = place[:, None] - place[None, :] + size - 1
        offset = offset[..., 0] * reach + offset[..., 1]
        # One-hot rows turn the lookup of biases into a product, whose backward pass needs no
        # scatter.
        self.offsets = constant(functional.one_hot(offset.flatten(), reach**2).mT.float())
        mask: Tensor | None = None
        if shift:  # regions that only the shift makes neighbours are masked
            place = torch.arange(side + padding)
            edge = (place >= len(place) - size).long() + (place >= len(place) - shift).long()
            region = windows(3 * edge[:, None] + edge[None, :], size)
            mask = constant(-100.0 * (region[:, :, None] != region[:, None, :])[:, None])
        self.mask = mask
        image = torch.arange(side**2).view(side, side).roll((-shift, -shift), (0, 1))
        order = windows(functional.pad(image, (0, padding) * 2, value=-1), size).flatten()
        self.order = constant(order.clamp(min=0))
        self.back = constant(order.argsort()[-(side**2) :])
        self.real = constant((order >= 0)[:, None]) if padding else None

    def bias_of(self, q: Tensor) -> Tensor:
        """Return the biases (1 or b, heads, size², size²)."""
        bias = (self.bias.mT @ self.offsets).view(1, self.heads, *(q.shape[2],) * 2)
        if self.mask is not None:  # one bias per window; without a mask, all windows share one
            bias = (bias + self.mask).to(q.dtype).repeat(len(q) // len(self.mask), 1, 1, 1)
        return bias.to(q.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, side², width) to the same shape."""
        if self.whole:  # a single window needs no reordering
            return super().forward(x)
        x = self._without_padding(gather(x, self.order, self.back))
        return gather(self._without_padding(super().forward(x)), self.back, self.order)

    def _without_padding(self, x: Tensor) -> Tensor:
        """Set padding to 0; ``gather`` fills it with an arbitrary token or gradient."""
        return x if self.real is None else x * self.real


class Merge(nn.Module):
    """Merges four neighbouring tokens into one of twice the width."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, side², width) to (b, side² / 4, 2 width)."""
        half = self.side // 2
        x = x.view(len(x), half, 2, half, 2, -1).permute(0, 1, 3, 4, 2, 5)
        merged: Tensor = self.reduction(self.norm(x.reshape(len(x), half * half, -1)))
        return merged


class SwinTiny(nn.Module):
    """Swin-Tiny for images of any size.

    Args:
        image: Side of the images.
        patch: Side of a patch.
        window: Side of a window, in patches.
        classes: Number of classes.
        drop_path: Share of residual branches that the last block drops in training.
    """

    def __init__(
        self,
        image: int = 32,
        patch: int = 2,
        window: int = 4,
        classes: int = 100,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        side, width = transformer.patches(image, patch), WIDTH
        if side % 8:
            raise LabError(f"image={image} must have a multiple of 8 patches of {patch} a side")
        self.patches, self.norm = nn.Conv2d(3, width, patch, patch), nn.LayerNorm(width)
        dropped = iter(transformer.rates(drop_path, sum(depth for depth, _ in STAGES)))
        layers: list[nn.Module] = []
        for depth, heads in STAGES:
            if layers:
                layers.append(Merge(width, side))
                width, side = 2 * width, side // 2
            for place in range(depth):
                attention = WindowAttention(width, heads, side, window, place % 2 == 1)
                layers.append(transformer.TransformerBlock(attention, width, next(dropped)))
        self.layers = nn.Sequential(*layers)
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        transformer.initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, 3, image, image)."""
        tokens = self.norm(self.patches(x).flatten(2).mT)
        logits: Tensor = self.head(self.last_norm(self.layers(tokens)).mean(1))
        return logits
