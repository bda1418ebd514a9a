"""The vision transformer: patches, a class token and learned positions."""

from __future__ import annotations

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


class Attention(nn.Module):
    """Multi-head attention among all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        q, k, v = heads_of(self.qkv(x), self.heads)
        y = functional.scaled_dot_product_attention(q, k, v)
        attended: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return attended


class VisionTransformer(nn.Module):
    """ViT of any size.

    Args:
        image: Side of the images.
        patch: Side of a patch.
        width: Width of a token.
        depth: Number of blocks.
        heads: Number of heads.
        classes: Number of classes.
        channels: Channels of the images.
        drop_path: Share of residual branches that the last block drops in training.
    """

    def __init__(
        self,
        image: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 9,
        heads: int = 3,
        classes: int = 100,
        channels: int = 3,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise LabError(f"heads={heads} must divide width={width}")
        self.first = nn.Parameter(torch.empty(1, 1, width).normal_(std=1e-6))
        self.positions = table(1, 1 + patches(image, patch) ** 2, width)
        self.patches = nn.Conv2d(channels, width, patch, patch)
        blocks = (
            TransformerBlock(Attention(width, heads), width, rate, eps=1e-6)
            for rate in rates(drop_path, depth)
        )
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, channels, image, image)."""
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat((self.first.expand(len(x), -1, -1), tokens), 1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return logits
