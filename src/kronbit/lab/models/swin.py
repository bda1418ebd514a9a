"""Swin-Tiny: attention within windows, which are shifted in every second block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronbit.lab.errors import LabError
from kronbit.lab.models.transformer import (
    TransformerBlock,
    heads_of,
    initialise,
    patches,
    rates,
    table,
)

WIDTH, STAGES = 96, ((2, 3), (2, 6), (6, 12), (2, 24))  # (blocks, heads); the width doubles


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


class WindowAttention(nn.Module):
    """Attention within windows, with a learned bias for each offset between two tokens.

    Args:
        width: Width of a token.
        heads: Number of heads.
        size: Side of a window.
        apart: (windows, size², size²), True for masked pairs of tokens; ``None`` for no mask.
    """

    offsets: Tensor
    mask: Tensor | None

    def __init__(self, width: int, heads: int, size: int, apart: Tensor | None) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.bias = table((2 * size - 1) ** 2, heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        place = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        offset = place[:, None] - place[None, :] + size - 1
        offset = offset[..., 0] * (2 * size - 1) + offset[..., 1]
        # One-hot rows turn the lookup of biases into a product, whose backward pass needs no
        # scatter.
        rows = functional.one_hot(offset.flatten(), (2 * size - 1) ** 2).mT.float()
        self.register_buffer("offsets", rows, persistent=False)
        mask = None if apart is None else -100.0 * apart[:, None]
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, windows · size², width) to the same shape."""
        b, length = len(x), self.size**2
        q, k, v = heads_of(self.qkv(x).unflatten(1, (-1, length)).flatten(0, 1), self.heads)
        bias = (self.bias.mT @ self.offsets).view(1, self.heads, length, length)
        if self.mask is not None:  # one bias per window; without a mask, all windows share one
            bias = (bias + self.mask).to(q.dtype).repeat(b, 1, 1, 1)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        attended: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return attended


class Block(TransformerBlock):
    """A pre-norm block with attention within windows.

    Inputs and outputs have the order of the image. As in timm, a window is at most as large as the
    image and is not shifted if it covers the image; the image is first shifted, then padded.

    Args:
        width: Width of a token.
        heads: Number of heads.
        side: Side of the image, in tokens.
        window: Side of a window.
        shifted: True to shift windows by half their side.
        drop_path: Share of residual branches that are dropped in training.
    """

    order: Tensor
    back: Tensor
    real: Tensor | None

    def __init__(
        self, width: int, heads: int, side: int, window: int, shifted: bool, drop_path: float
    ) -> None:
        size = min(window, side)
        whole = side == size
        shift = size // 2 if shifted and not whole else 0
        padding = -side % size
        apart = None
        if shift:  # regions that only the shift makes neighbours are masked
            place = torch.arange(side + padding)
            edge = (place >= len(place) - size).long() + (place >= len(place) - shift).long()
            region = windows(3 * edge[:, None] + edge[None, :], size)
            apart = region[:, :, None] != region[:, None, :]
        super().__init__(WindowAttention(width, heads, size, apart), width, drop_path)
        self.whole = whole
        image = torch.arange(side**2).view(side, side).roll((-shift, -shift), (0, 1))
        order = windows(functional.pad(image, (0, padding) * 2, value=-1), size).flatten()
        self.register_buffer("order", order.clamp(min=0), persistent=False)
        self.register_buffer("back", order.argsort()[-(side**2) :], persistent=False)
        real = (order >= 0)[:, None] if padding else None
        self.register_buffer("real", real, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        """Map (b, side², width) to the same shape."""
        if self.whole:  # a single window needs no reordering
            return super().attend(x)
        x = self._without_padding(gather(x, self.order, self.back))
        return gather(self._without_padding(self.attention(x)), self.back, self.order)

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
        side, width = patches(image, patch), WIDTH
        if side % 8:
            raise LabError(f"image={image} must have a multiple of 8 patches of {patch} a side")
        self.patches, self.norm = nn.Conv2d(3, width, patch, patch), nn.LayerNorm(width)
        dropped = iter(rates(drop_path, sum(depth for depth, _ in STAGES)))
        layers: list[nn.Module] = []
        for depth, heads in STAGES:
            if layers:
                layers.append(Merge(width, side))
                width, side = 2 * width, side // 2
            for place in range(depth):
                shifted = place % 2 == 1
                layers.append(Block(width, heads, side, window, shifted, next(dropped)))
        self.layers = nn.Sequential(*layers)
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, 3, image, image)."""
        tokens = self.norm(self.patches(x).flatten(2).mT)
        logits: Tensor = self.head(self.last_norm(self.layers(tokens)).mean(1))
        return logits
