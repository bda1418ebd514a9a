"""Networks for the speed benchmarks, with random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronbit.lab.models import build
from kronbit.lab.plan.networks import PRESETS


@dataclass(frozen=True)
class Case:
    """A network, its batch and its schedule.

    Attributes:
        build: Builds the network on the current device.
        batch: Makes a batch on the GPU.
        dtype: Dtype of the parameters.
        autocast: True if the forward pass runs under bf16 autocast.
        schedule: T1 and T2, over which the cost is amortised.
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


def preset(name: str) -> nn.Module:
    return build(**PRESETS[name])


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
    # A common memory format on GPUs.
    "resnet34-channels-last": Case(
        lambda: build("resnet34").to(memory_format=torch.channels_last),
        images,
        torch.float32,
        True,
        (100, 500),
    ),
    "gpt2-124m": Case(
        lambda: preset("gpt2-124m"),
        lambda: tokens(8, 1024, 50304),
        torch.float32,
        True,
        (200, 200),
    ),
    "llama-350m": Case(
        lambda: preset("llama-350m"),
        lambda: tokens(32, 256, 32000),
        torch.bfloat16,
        False,
        (200, 200),
    ),
}
