"""Swin-Tiny: attention within windows that are shifted in every second block."""

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
    """x[:, index] for x (b, tokens, width), whose gradient is a gather as well.

    Autograd would scatter: additions into zeros, although no token is added to another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """The gather."""
        ctx.save_for_backward(inverse)
        return x.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of each token, from its place."""
        (inverse,) = ctx.saved_tensors
        return grad.index_select(1, inverse), None, None


def gather(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """x[:, index]; ``inverse`` gives each token's place in the result."""
    gathered: Tensor = Gather.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return gathered


def windows(image: Tensor, size: int) -> Tensor:
    """(h, w) -> (windows, size²)."""
    h, w = image.shape
    return image.view(h // size, size, w // size, size).transpose(1, 2).reshape(-1, size * size)


class WindowAttention(nn.Module):
    """Attention within windows, with a learned bias for each offset between two tokens.

    Args:
        width: Of a token.
        heads: How many.
        size: Side of a window.
        apart: (windows, size², size²), true where two tokens must not see each other, or ``None``.
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
        # One row per offset: a product with it looks biases up, and its gradient adds them up
        # without a scatter.
        rows = functional.one_hot(offset.flatten(), (2 * size - 1) ** 2).mT.float()
        self.register_buffer("offsets", rows, persistent=False)
        mask = None if apart is None else -100.0 * apart[:, None]
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, windows · size², width) -> the same."""
        b, length = len(x), self.size**2
        q, k, v = heads_of(self.qkv(x).unflatten(1, (-1, length)).flatten(0, 1), self.heads)
        bias = (self.bias.mT @ self.offsets).view(1, self.heads, length, length)
        if self.mask is not None:  # by window; without one, all windows share the bias
            bias = (bias + self.mask).to(q.dtype).repeat(b, 1, 1, 1)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        attended: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return attended


class Block(TransformerBlock):
    """Attention within windows and an MLP, each normalised before and added.

    Tokens come and go in the order of the image. As in timm, a window is no larger than the image,
    is not shifted where it covers it, and the image is shifted first and then padded at its end.

    Args:
        width: Of a token.
        heads: Per attention.
        side: Of the image, in tokens.
        window: Side of a window.
        shifted: Whether windows are shifted by half their side.
        drop_path: Share of residual branches dropped while training.
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
        if shift:  # what the shift brings together at the end of the padded image stays apart
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
        """(b, side², width) -> the same."""
        if self.whole:  # one window, in the order of the image
            return super().attend(x)
        x = self._without_padding(gather(x, self.order, self.back))
        return gather(self._without_padding(self.attention(x)), self.back, self.order)

    def _without_padding(self, x: Tensor) -> Tensor:
        """Zeros in the places of the padding, where ``gather`` puts some token or gradient."""
        return x if self.real is None else x * self.real


class Merge(nn.Module):
    """Four neighbours become one token of twice the width."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, side², width) -> (b, side² / 4, 2 width)."""
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
        classes: How many.
        drop_path: Share of residual branches dropped by the last block while training.
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
        """Logits of images (b, 3, image, image)."""
        tokens = self.norm(self.patches(x).flatten(2).mT)
        logits: Tensor = self.head(self.last_norm(self.layers(tokens)).mean(1))
        return logits
