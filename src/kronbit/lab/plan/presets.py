"""Networks that ``kronbit plan`` knows by name: those of the paper, and a few large ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A network as it is usually trained.

    Attributes:
        model: Its name for ``kronbit.lab.models.build``.
        options: What that takes besides.
        dtype: Of the parameters: ``fp32`` or ``bf16``.
        image: Side of the images; ``None`` if it reads tokens.
    """

    model: str
    options: Mapping[str, Any]
    dtype: str
    image: int | None = None


def _llama(**options: int) -> Preset:
    return Preset("llama", {"vocab_size": 32000, **options}, "bf16")


def _imagenet(model: str, **options: int) -> Preset:
    return Preset(model, {"classes": 1000, **options}, "fp32", image=224)


PRESETS: Mapping[str, Preset] = {
    # 50304: the vocabulary of 50257 filled up to a multiple of 64, as it is trained for speed.
    "gpt2-124m": Preset("gpt2", {"vocab_size": 50304}, "bf16"),
    "llama-130m": _llama(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
    ),
    "llama-350m": _llama(
        hidden_size=1024, intermediate_size=2736, num_hidden_layers=24, num_attention_heads=16
    ),
    "llama2-7b": _llama(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    ),
    "llama3-8b": _llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama2-70b": _llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "vit-b32": _imagenet("vit-base-32", image=224),
    "resnet50": _imagenet("resnet50"),
    "swin-tiny": _imagenet("swin-tiny", image=224, patch=4, window=7),
}
