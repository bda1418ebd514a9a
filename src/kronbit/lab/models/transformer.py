"""The vision transformer, and its parts that Swin shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronbit.lab.errors import LabError


def patches(image: int, patch: int) -> int:
    """Return the number of patches along a side.

    Raises:
        LabError: If the patch does not divide the image.
    """
    if image % patch:
        raise LabError(f"patch={patch} must divide image={image}")
    return image // patch


def rates(drop_path: float, depth: int) -> list[float]:
    """Return the drop rate of each block, rising linearly from 0 to ``drop_path``."""
    return [drop_path * place / max(depth - 1, 1) for place in range(depth)]


class Attention(nn.Module):
    """Multi-head attention among all tokens, or within groups of ``length`` successive tokens."""

    def __init__(self, width: int, heads: int, length: int | None = None) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def bias_of(self, q: Tensor) -> Tensor | None:
        """Return a bias for the scores of queries (b, heads, length, width of a head), or None."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        parts = self.qkv(x).unflatten(1, (-1, self.length or x.shape[1])).flatten(0, 1)
        q, k, v = parts.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias_of(q))
        attended: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return attended


class DropPath(nn.Dropout):
    """Drops a residual branch for random examples in training, and scales the others.

    Args:
        p: Share of examples whose branch is dropped.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        if not self.training or self.p == 0:
            return x
        return x * functional.dropout(x.new_ones(len(x), 1, 1), self.p)


class TransformerBlock(nn.Module):
    """A pre-norm block: attention and an MLP, each in a residual branch.

    Args:
        attention: Maps tokens to tokens of the same shape.
        width: Width of a token. The hidden layer of the MLP is four times as wide.
        drop_path: Share of residual branches that are dropped in training.
        eps: Epsilon of the norms.
    """

    def __init__(
        self, attention: nn.Module, width: int, drop_path: float, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        x = x + self.drop(self.attention(self.norm1(x)))
        branch: Tensor = self.drop(self.mlp(self.norm2(x)))
        return x + branch


def initialise(model: nn.Module) -> None:
    """Initialise linear layers: weights with a standard deviation of 0.02, biases with 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def table(*shape: int) -> nn.Parameter:
    """Return a learned table, such as that of positions."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


class VisionTransformer(nn.Module):
    """ViT of any size: patches, a class token and learned positions.

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
