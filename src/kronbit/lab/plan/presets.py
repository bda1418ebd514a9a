"""Networks that ``kronbit plan`` knows by name: those of the paper, and a few larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A network in the precision it is usually trained in.

    Attributes:
        model: Name for ``kronbit.lab.models.build``.
        options: Options for ``kronbit.lab.models.build``.
        dtype: Dtype of the parameters: ``fp32`` or ``bf16``.
        image: Side of the images; ``None`` if the inputs are tokens.
    """

    model: str
    options: Mapping[str, Any]
    dtype: str
    image: int | None = None


def _llama(
    width: int,
    inner: int,
    layers: int,
    heads: int,
    shared: int | None = None,
    vocabulary: int = 32000,
) -> Preset:
    """Return LLaMA; ``shared`` is the number of key and value heads, ``heads`` by default."""
    options = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared or heads,
        "vocab_size": vocabulary,
    }
    return Preset("llama", options, "bf16")


def _imagenet(model: str, **options: int) -> Preset:
    return Preset(model, {"classes": 1000, **options}, "fp32", image=224)


PRESETS: Mapping[str, Preset] = {
    # 50304 is the vocabulary of 50257, padded to a multiple of 64 for speed.
    "gpt2-124m": Preset("gpt2", {"vocab_size": 50304}, "bf16"),
    "llama-130m": _llama(768, 2048, layers=12, heads=12),
    "llama-350m": _llama(1024, 2736, layers=24, heads=16),
    "llama2-7b": _llama(4096, 11008, layers=32, heads=32),
    "llama3-8b": _llama(4096, 14336, layers=32, heads=32, shared=8, vocabulary=128256),
    "llama2-70b": _llama(8192, 28672, layers=80, heads=64, shared=8),
    "vit-b32": _imagenet("vit-base-32", image=224),
    "resnet50": _imagenet("resnet50"),
    "swin-tiny": _imagenet("swin-tiny", image=224, patch=4, window=7),
}
