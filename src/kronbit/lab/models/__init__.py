"""Networks of the lab, by name.

Image networks take (b, channels, h, w) and return logits. Layers, parameter counts and
initialisation are those of timm, so that results can be compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from kronbit.lab.errors import lab_error, refuse_unknown
from kronbit.lab.models.convolutional import VGG19, DigitsCNN, ResNet, basic, bottleneck
from kronbit.lab.models.language import gpt2, llama
from kronbit.lab.models.swin import SwinTiny
from kronbit.lab.models.transformer import VisionTransformer

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "vgg19": VGG19,
    "resnet34": partial(ResNet, basic),
    "resnet50": partial(ResNet, bottleneck, classes=1000, stem="imagenet"),
    "vit": VisionTransformer,
    "vit-small": partial(VisionTransformer, width=384, depth=12, heads=6),
    "vit-base-32": partial(
        VisionTransformer, image=224, patch=32, width=768, depth=12, heads=12, classes=1000
    ),
    "swin-tiny": SwinTiny,
    "digits-cnn": DigitsCNN,
    "gpt2": gpt2,
    "llama": llama,
}


def build(name: str, **options: Any) -> nn.Module:
    """Build a network with fresh weights on the default device.

    Args:
        name: A key of ``MODELS``.
        **options: Arguments of the network: ``classes``, ``image`` (the side), ``patch``, ...; for
            ``gpt2`` and ``llama`` the fields of their transformers configuration.

    Raises:
        LabError: If the network or an option does not exist, or a value is wrong.
    """
    refuse_unknown("model.name", [name], MODELS)
    taken = inspect.signature(MODELS[name]).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in taken):  # others check **options themselves
        refuse_unknown(f"an option of model {name!r}", options, [one.name for one in taken])
    kinds = TypeError, ValueError, ArithmeticError, RuntimeError
    with lab_error(f"model {name!r} cannot be built", *kinds):
        return MODELS[name](**options)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of images, or of tokens: (b, t) -> (b, t, vocabulary)."""
    output = model(x)
    if isinstance(output, Tensor):
        return output
    values: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return values
