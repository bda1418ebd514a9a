"""Parts shared by ViT and Swin."""

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


def heads_of(x: Tensor, heads: int) -> Tensor:
    """View queries, keys and values (b, n, 3 width) as (3, b, heads, n, width of a head)."""
    parts: Tensor = x.unflatten(-1, (3, heads, -1))
    return parts.permute(2, 0, 3, 1, 4)


class MLP(nn.Sequential):
    """Two linear layers; the hidden layer is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class DropPath(nn.Module):
    """Drops a residual branch for random examples in training, and scales the others.

    Args:
        rate: Share of examples whose branch is dropped.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        if not self.training or self.rate == 0:
            return x
        return x * functional.dropout(x.new_ones(len(x), 1, 1), self.rate)


class TransformerBlock(nn.Module):
    """A pre-norm block: attention and an MLP, each in a residual branch.

    Args:
        attention: Maps tokens to tokens of the same shape.
        width: Width of a token.
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
        self.mlp = MLP(width)
        self.drop = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        x = x + self.drop(self.attend(self.norm1(x)))
        branch: Tensor = self.drop(self.mlp(self.norm2(x)))
        return x + branch

    def attend(self, x: Tensor) -> Tensor:
        """Map (b, tokens, width) to the same shape."""
        attended: Tensor = self.attention(x)
        return attended


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
