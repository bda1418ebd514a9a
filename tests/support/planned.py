"""Small networks whose memory is planned."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 70))


class Convolutional(nn.Module):
    """A small vision network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 24, 3, stride=2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.max_pool2d(self.norm(self.first(x)).relu(), 2))
        return self.head(functional.layer_norm(functional.gelu(y).mean((2, 3)), (24,)))


class Attending(nn.Module):
    """An attention layer, written by hand or by ``nn.MultiheadAttention``."""

    def __init__(self, heads: int = 4, width: int = 64, module: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(11, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True) if module else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.attention is not None:
            return self.attention(x, x, x, need_weights=False)[0]
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return y.transpose(1, 2).flatten(2)
