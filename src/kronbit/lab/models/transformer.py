"""What ViT and Swin have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronbit.lab.errors import LabError


def patches(image: int, patch: int) -> int:
    """How many patches there are along a side.

    Raises:
        LabError: If they do not cover the image.
    """
    if image % patch:
        raise LabError(f"patch={patch} must divide image={image}")
    return image // patch


def rates(drop_path: float, depth: int) -> list[float]:
    """The share of paths dropped by each block: from 0 for the first to the given one."""
    return [drop_path * place / max(depth - 1, 1) for place in range(depth)]


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Queries, keys and values (b, n, 3 width) -> (3, b, heads, n, width of a head), uncopied."""
    parts: Tensor = x.unflatten(-1, (3, heads, -1))
    return parts.permute(2, 0, 3, 1, 4)


class MLP(nn.Sequential):
    """Four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class DropPath(nn.Module):
    """Drops a residual branch for some of the examples while training, and scales the others.

    Args:
        rate: The share of examples.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(b, tokens, width) -> the same."""
        if not self.training or self.rate == 0:
            return x
        return x * functional.dropout(x.new_ones(len(x), 1, 1), self.rate)


class TransformerBlock(nn.Module):
    """Attention and an MLP, each normalised before and added.

    Args:
        attention: From tokens to tokens.
        width: Of a token.
        drop_path: Share of residual branches dropped while training.
        eps: Of the norms.
    """

    def __init__(
        self, attention: nn.Module, width: int, drop_path: float, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = MLP(width)
        self.drop = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(b, tokens, width) -> the same."""
        x = x + self.drop(self.attend(self.norm1(x)))
        branch: Tensor = self.drop(self.mlp(self.norm2(x)))
        return x + branch

    def attend(self, x: Tensor) -> Tensor:
        """(b, tokens, width) -> the same."""
        attended: Tensor = self.attention(x)
        return attended


def initialise(model: nn.Module) -> None:
    """Linear layers as transformers start: small weights, no bias."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def table(*shape: int) -> nn.Parameter:
    """A learned table, such as one of positions."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))
