"""Data sets. The batch of a step is a function of seed, step and rank.

A resumed run therefore needs no state of the data, and all optimizers of a comparison get the same
batches.

A data set yields this rank's inputs and targets on the device: ``batch(step)``, and ``held_out()``
in order. ``classifies`` is True if targets are classes of examples, False if they are the next
tokens; ``examples`` is the number of examples in an epoch; ``outputs`` is the number of classes, or
one more than the largest token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kronbit.lab.data.folders import FolderImages
from kronbit.lab.data.images import DeviceImages, Setting
from kronbit.lab.data.pictures import cifar100, digits, tiny_imagenet
from kronbit.lab.data.tokens import Tokens, pydoc, text, tokens
from kronbit.lab.errors import lab_error, refuse_unknown

__all__ = ["SETS", "Data", "Setting", "open_data"]

Data: TypeAlias = DeviceImages | FolderImages | Tokens
SETS: Mapping[str, Callable[..., Data]] = {
    "pydoc": pydoc,
    "text": text,
    "tokens": tokens,
    "digits": digits,
    "cifar100": cifar100,
    "tiny-imagenet": tiny_imagenet,
    "image-folder": FolderImages,
}


def open_data(options: Mapping[str, Any], setting: Setting) -> Data:
    """Open the data set of a recipe, given its ``name`` and its options."""
    given = dict(options)
    name = given.pop("name")
    refuse_unknown("data.name", [name], SETS)
    with lab_error(f"data {name!r}", TypeError):
        return SETS[name](setting, **given)
