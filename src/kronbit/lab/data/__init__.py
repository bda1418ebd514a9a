"""Data sets. The batch of a step is a function of seed, step and rank.

A resumed run therefore needs no state of the data, and all optimizers of a comparison get the same
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kronbit.lab.data.digits import digits
from kronbit.lab.data.folders import image_folder
from kronbit.lab.data.images import Setting
from kronbit.lab.data.pictures import cifar100, tiny_imagenet
from kronbit.lab.data.tokens import pydoc, text, tokens
from kronbit.lab.errors import LabError, refuse_unknown

Pair: TypeAlias = tuple[Tensor, Tensor]


class Data(Protocol):
    """A training set and a held-out set.

    Attributes:
        classifies: True if targets are classes of examples, False if they are the next tokens.
        examples: Number of examples per epoch.
        outputs: Number of classes, or one more than the largest token.
    """

    classifies: bool
    examples: int
    outputs: int

    def batch(self, step: int) -> Pair:
        """Return this rank's inputs and targets of a step, on the device."""

    def held_out(self) -> Iterator[Pair]:
        """Yield this rank's inputs and targets for evaluation, in order, on the device."""


SETS: Mapping[str, Callable[..., Data]] = {
    "pydoc": pydoc,
    "text": text,
    "tokens": tokens,
    "digits": digits,
    "cifar100": cifar100,
    "tiny-imagenet": tiny_imagenet,
    "image-folder": image_folder,
}


def open_data(
    options: Mapping[str, Any],
    folder: Path,
    *,
    batch: int,
    seed: int,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
    holdout: float = 0.0,
) -> Data:
    """Open the data set of a recipe.

    Args:
        options: ``name``, and the options of that set.
        folder: Folder with downloaded sets.
        batch: Examples per step, over all ranks.
        seed: Seed of order and augmentation.
        device: Device of the batches.
        rank: Rank of this process.
        ranks: Number of ranks.
        holdout: Share of the training set that replaces the held-out set.

    Raises:
        LabError: If the set does not exist, or its files are missing.
    """
    given = dict(options)
    name = given.pop("name")
    refuse_unknown("data.name", [name], SETS)
    if batch % ranks:
        raise LabError(f"batch={batch} cannot be divided among {ranks} ranks: --set batch=...")
    setting = Setting(folder, batch, seed, device, rank, ranks, holdout)
    try:
        return SETS[name](setting, **given)
    except TypeError as error:
        raise LabError(f"data {name!r}: {error}") from error
