"""The networks that are measured, with random data: built from transformers and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Case:
    """A network, its batch and its schedule.

    Attributes:
        build: Makes the network on the current device.
        batch: Makes a batch on the GPU.
        dtype: Of the parameters.
        autocast: Whether the forward pass runs under bf16 autocast.
        schedule: (T1, T2) over which the cost is spread.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    dtype: torch.dtype
    autocast: bool
    schedule: tuple[int, int]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.autocast):
            out = model(**batch)
        return out if isinstance(out, Tensor) else out.loss


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(h)) + self.shortcut(x)).relu()


class ResNet34(nn.Module):
    """ResNet-34 for 32x32 images: a 3x3 stem, no pooling before the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        blocks, inner = [], 64
        for outer, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for i in range(count):
                blocks.append(BasicBlock(inner, outer, 2 if i == 0 and outer > 64 else 1))
                inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 100)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        h = self.blocks(self.stem(pixel_values)).mean((2, 3))
        return functional.cross_entropy(self.head(h), labels)


def windows(x: Tensor, size: int) -> Tensor:
    """(b, h, w, c) -> (b windows, size², c)."""
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c).transpose(2, 3)
    return x.reshape(-1, size * size, c)


class SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, resolution: int, shifted: bool) -> None:
        super().__init__()
        self.heads, self.size = heads, min(4, resolution)
        self.shift = self.size // 2 if shifted and resolution > self.size else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.zeros((2 * self.size - 1) ** 2, heads))
        place = torch.cartesian_prod(torch.arange(self.size), torch.arange(self.size))
        apart = place[:, None] - place[None, :] + self.size - 1
        self.register_buffer("index", apart[..., 0] * (2 * self.size - 1) + apart[..., 1])
        region = torch.zeros(1, resolution, resolution, 1)
        if self.shift:
            edge = torch.arange(resolution) >= resolution - self.shift
            region = (2.0 * edge[:, None] + 1.0 * edge[None, :])[None, :, :, None]
        label = windows(region, self.size).squeeze(-1)
        self.register_buffer("mask", -100.0 * (label[:, :, None] != label[:, None, :]))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = windows(torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)), self.size)
        length = self.size**2
        q, k, v = (
            self.qkv(y).view(-1, length, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        )
        bias = self.bias[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1)
        bias = bias + self.mask.repeat(b, 1, 1).unsqueeze(1)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y = self.proj(y.transpose(1, 2).reshape(-1, length, c))
        y = y.view(b, h // self.size, w // self.size, self.size, self.size, c).transpose(2, 3)
        x = x + torch.roll(y.reshape(b, h, w, c), (self.shift, self.shift), (1, 2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Merge(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class SwinTiny(nn.Module):
    """Swin-Tiny for 32x32 images: patches of 2, windows of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 96, 2, 2), nn.LayerNorm(96)
        layers: list[nn.Module] = []
        for stage, (depth, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
            width, resolution = 96 * 2**stage, 16 // 2**stage
            layers += [SwinBlock(width, heads, resolution, i % 2 == 1) for i in range(depth)]
            layers += [Merge(width)] if stage < 3 else []
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 100))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(self.patches(pixel_values).permute(0, 2, 3, 1))
        return functional.cross_entropy(self.head(self.layers(h).mean((1, 2))), labels)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50304, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def llama_350m() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=2736,
            num_hidden_layers=24,
            num_attention_heads=16,
            max_position_embeddings=1024,
        )
    )


def images() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(128, 3, 32, 32, device="cuda"),
        "labels": torch.randint(0, 100, (128,), device="cuda"),
    }


def tokens(count: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, vocabulary, (count, length), device="cuda")
    return {"input_ids": drawn, "labels": drawn}


CASES = {
    "swin-tiny": Case(SwinTiny, images, torch.float32, False, (100, 500)),
    "resnet34": Case(ResNet34, images, torch.float32, False, (100, 500)),
    "gpt2-124m": Case(gpt2, lambda: tokens(8, 1024, 50304), torch.float32, True, (200, 200)),
    "llama-350m": Case(
        llama_350m, lambda: tokens(32, 256, 32000), torch.bfloat16, False, (200, 200)
    ),
}
