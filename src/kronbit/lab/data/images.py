"""Images that are stored and augmented on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kronbit.lab.data.augment import Augmentation
from kronbit.lab.data.holdout import divide
from kronbit.lab.errors import LabError
from kronbit.lab.randomness import seed_of

EVALUATED_AT_ONCE = 500  # images


@dataclass(frozen=True)
class Setting:
    """Options that all data sets share; see ``open_data``."""

    folder: Path
    batch: int
    seed: int
    device: torch.device
    rank: int
    ranks: int
    holdout: float = 0.0

    def generator(self, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the random generator of this rank at a step."""
        return torch.Generator(device).manual_seed(seed_of("batch", self.seed, step, self.rank))

    def order(self, epoch: int, examples: int) -> Tensor:
        """Return the order of examples in an epoch, which is the same on all ranks."""
        generator = torch.Generator().manual_seed(seed_of("order", self.seed, epoch))
        return torch.randperm(examples, generator=generator)

    def local(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        share = self.batch // self.ranks
        return batch[self.rank * share : (self.rank + 1) * share]

    def indices(self, step: int, examples: int, device: torch.device) -> Tensor:
        """Return the indices of this rank's examples. An epoch ends with its last full batch."""
        per_epoch = examples // self.batch
        epoch, position = divmod(step, per_epoch)
        order = _cached_order(self, epoch, examples, device)
        return self.local(order[position * self.batch : (position + 1) * self.batch])


@lru_cache(maxsize=2)
def _cached_order(setting: Setting, epoch: int, examples: int, device: torch.device) -> Tensor:
    order = setting.order(epoch, examples)
    if device.type == "cuda":
        order = order.pin_memory()  # otherwise the host would wait
    return order.to(device, non_blocking=True)


class HeldImages:
    """Images of one size, stored as bytes on the device.

    Args:
        setting: Options that all data sets share.
        train: Training images, uint8 (n, c, h, w), and their labels.
        test: Held-out images and labels.
        outputs: Number of classes.
        augmentation: Augmentation of training images.
        mean: Mean of each channel, for values from 0 to 1.
        std: Standard deviation of each channel, for values from 0 to 1.
    """

    classifies = True

    def __init__(
        self,
        setting: Setting,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        outputs: int,
        augmentation: Augmentation,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        self._setting, self._augment, self.outputs = setting, augmentation, outputs
        device = setting.device
        if setting.holdout:
            kept, held = divide(train[1], setting.holdout)
            train, test = ((train[0][part], train[1][part]) for part in (kept, held))
        self._images, self._labels = (part.to(device) for part in train)
        self._test_images, self._test_labels = (part.to(device) for part in test)
        self._mean, self._std = (torch.tensor(value, device=device) for value in (mean, std))
        self.examples = len(self._images)
        if setting.batch > self.examples:
            raise LabError(
                f"batch={setting.batch} is larger than the {self.examples} training images: "
                "--set batch=..."
            )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step."""
        chosen = self._setting.indices(step, self.examples, self._setting.device)
        generator = self._setting.generator(step, self._setting.device)
        images, labels = self._images[chosen], self._labels[chosen]
        return self._augment(images, labels, generator, self._mean, self._std, self.outputs)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets for evaluation."""
        plain = Augmentation()
        rank, ranks = self._setting.rank, self._setting.ranks
        generator = self._setting.generator(0, self._setting.device)
        parts = (part[rank::ranks] for part in (self._test_images, self._test_labels))
        for images, labels in zip(*(x.split(EVALUATED_AT_ONCE) for x in parts), strict=True):
            yield plain(images, labels, generator, self._mean, self._std, self.outputs)
