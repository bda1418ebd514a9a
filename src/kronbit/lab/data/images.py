"""Data sets of images: order, held-out part, and images that are stored on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kronbit.lab.data.augment import Augmentation
from kronbit.lab.errors import LabError
from kronbit.lab.randomness import seed_of

Pair: TypeAlias = tuple[Tensor, Tensor]

_AT_ONCE = 500  # images of an evaluation
# Mean and standard deviation of each channel, for values from 0 to 1.
Normal: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
IMAGENET: Normal = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Setting:
    """Options that all data sets share."""

    folder: Path  # with downloaded sets
    batch: int  # examples per step, over all ranks
    seed: int  # of order and augmentation
    device: torch.device
    rank: int = 0
    ranks: int = 1
    holdout: float = 0.0  # share of the training set that replaces the held-out set

    def __post_init__(self) -> None:
        if self.batch % self.ranks:
            raise LabError(
                f"batch={self.batch} cannot be divided among {self.ranks} ranks: --set batch=..."
            )

    @property
    def share(self) -> int:
        """Number of this rank's examples in a batch."""
        return self.batch // self.ranks

    def local(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        return batch[self.rank * self.share : (self.rank + 1) * self.share]

    def indices(self, step: int, examples: int, device: torch.device) -> Tensor:
        """Return the indices of this rank's examples. An epoch ends with its last full batch."""
        epoch, position = divmod(step, examples // self.batch)
        order = _order(self.seed, epoch, examples, device)
        return self.local(order[position * self.batch : (position + 1) * self.batch])


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without making the host wait."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, examples: int, device: torch.device) -> Tensor:
    """Return the order of examples in an epoch, which is the same on all ranks."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return moved(torch.randperm(examples, generator=generator), device)


def divide(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Hold out a share of each class, rounded, independently of the recipe's seed.

    Returns:
        Indices of training examples and of held-out examples, both in ascending order.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        examples = order[labels[order] == label]
        held[examples[: round(share * len(examples))]] = True
    if held.all() or not held.any():
        raise LabError(
            f"holdout={share} leaves {int((~held).sum())} of {len(labels)} examples for training: "
            "--set holdout=..."
        )
    return (~held).nonzero().flatten(), held.nonzero().flatten()


class Images:
    """Images of ``outputs`` classes. Training augments its ``examples`` images on the device."""

    classifies = True

    def __init__(
        self, setting: Setting, examples: int, outputs: int, normal: Normal, **augmentation: Any
    ) -> None:
        if setting.batch > examples:
            raise LabError(
                f"batch={setting.batch} is larger than the {examples} training images: "
                "--set batch=..."
            )
        self._setting, self.examples, self.outputs = setting, examples, outputs
        self._augment = Augmentation(**augmentation)
        self._mean, self._std = (torch.tensor(x, device=setting.device) for x in normal)

    def _augmented(self, images: Tensor, labels: Tensor, step: int | None = None) -> Pair:
        """Return inputs and targets of a step; without one, images are only normalised."""
        setting, augment = self._setting, Augmentation() if step is None else self._augment
        seed = seed_of("batch", setting.seed, step or 0, setting.rank)
        generator = torch.Generator(setting.device).manual_seed(seed)
        return augment(images, labels, generator, self._mean, self._std, self.outputs)


class DeviceImages(Images):
    """Images of one size, uint8 (n, c, h, w), stored on the device with their labels.

    ``parts`` are the training set and the held-out set.
    """

    def __init__(
        self, setting: Setting, parts: list[Pair], outputs: int, normal: Normal, **augmentation: Any
    ) -> None:
        if setting.holdout:
            images, labels = parts[0]
            parts = [(images[rows], labels[rows]) for rows in divide(labels, setting.holdout)]
        super().__init__(setting, len(parts[0][1]), outputs, normal, **augmentation)
        self._images, self._labels = (part.to(setting.device) for part in parts[0])
        self._test_images, self._test_labels = (part.to(setting.device) for part in parts[1])

    def batch(self, step: int) -> Pair:
        """Return this rank's inputs and targets of a step."""
        chosen = self._setting.indices(step, self.examples, self._setting.device)
        return self._augmented(self._images[chosen], self._labels[chosen], step)

    def held_out(self) -> Iterator[Pair]:
        """Yield this rank's inputs and targets for evaluation, in order."""
        local = slice(self._setting.rank, None, self._setting.ranks)
        images, labels = self._test_images[local], self._test_labels[local]
        for pair in zip(images.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True):
            yield self._augmented(*pair)
