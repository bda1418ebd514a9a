"""Data: what is trained on at each step is a function of seed, step and rank alone.

So a resumed run needs no state of it, and all optimizers of a comparison see the same.
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
from kronbit.lab.errors import LabError
from kronbit.lab.named import refuse_unknown

Pair: TypeAlias = tuple[Tensor, Tensor]


class Data(Protocol):
    """A training set and a held-out set.

    Attributes:
        classifies: Whether targets are classes of whole examples, else the next tokens.
        examples: How many there are per epoch.
        outputs: How many classes, or one more than the largest token.
    """

    classifies: bool
    examples: int
    outputs: int

    def batch(self, step: int) -> Pair:
        """Inputs and targets of a step: this rank's part, on the device."""

    def held_out(self) -> Iterator[Pair]:
        """Inputs and targets for evaluation: this rank's part, in order, on the device."""


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
    """The data of a recipe.

    Args:
        options: ``name``, and what the set takes.
        folder: Where downloaded sets are.
        batch: Examples per step, over all ranks.
        seed: Of order and augmentation.
        device: Where batches are wanted.
        rank: Whose part.
        ranks: Of how many.
        holdout: Share of the training set that takes the place of the held-out set.

    Raises:
        LabError: If there is no such set, or its files are missing.
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
