"""The networks that are measured, with random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronbit.lab.models import build


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
            if "pixel_values" in batch:
                return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])
            return model(**batch).loss


def gpt2() -> nn.Module:
    return build("gpt2", vocab_size=50304)


def llama_350m() -> nn.Module:
    return build(
        "llama",
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2736,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=1024,
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
    "swin-tiny": Case(lambda: build("swin-tiny"), images, torch.float32, False, (100, 500)),
    "resnet34": Case(lambda: build("resnet34"), images, torch.float32, False, (100, 500)),
    "gpt2-124m": Case(gpt2, lambda: tokens(8, 1024, 50304), torch.float32, True, (200, 200)),
    "llama-350m": Case(
        llama_350m, lambda: tokens(32, 256, 32000), torch.bfloat16, False, (200, 200)
    ),
}
