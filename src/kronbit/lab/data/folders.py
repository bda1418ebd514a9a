"""Large images in one folder per class, such as ImageNet, decoded by worker processes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from kronbit.lab.data.images import IMAGENET, Images, Pair, Setting, divide
from kronbit.lab.data.pictures import class_names, list_images, open_picture, require, to_tensor
from kronbit.lab.errors import LabError

# Index of an image, and the seed of its augmentation; None for the central crop.
Draw: TypeAlias = tuple[int, str | None]


@dataclass(frozen=True)
class _Folder(Dataset[tuple[Tensor, int]]):
    """Decodes and crops single images. All randomness comes from the seed of the draw."""

    files: list[tuple[Path, int]]
    image: int
    jitter: float
    whole: float

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        from PIL import ImageEnhance, ImageOps

        index, seed = draw
        path, label = self.files[index]
        picture, size = open_picture(path), (self.image, self.image)
        if seed is None:
            picture = ImageOps.fit(picture, size, method=2, bleed=(1 - self.whole) / 2)
            return to_tensor(picture), label
        chance = random.Random(seed)
        picture = picture.resize(size, box=_crop(*picture.size, chance), resample=2)
        if self.jitter:
            for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
                amount = chance.uniform(1 - self.jitter, 1 + self.jitter)
                picture = kind(picture).enhance(amount)
        return to_tensor(picture), label


def _crop(width: int, height: int, chance: random.Random) -> tuple[int, int, int, int]:
    """Draw a rectangle of 8 to 100 % of the area, with an aspect ratio of 3:4 to 4:3."""
    for _ in range(10):
        area = chance.uniform(0.08, 1.0) * width * height
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w = h = min(width, height)
    left, top = chance.randint(0, width - w), chance.randint(0, height - h)
    return left, top, left + w, top + h


class FolderImages(Images):
    """Images in ``train/<class>/`` and ``val/<class>/``, which workers decode ahead of time.

    ``image`` is the side of the network's inputs, ``jitter`` the maximum relative change of
    brightness, contrast and color, ``whole`` the share of the shorter side kept in evaluations.
    """

    def __init__(
        self,
        setting: Setting,
        path: str = "imagenet",
        image: int = 224,
        jitter: float = 0.0,
        whole: float = 0.875,
        workers: int = 8,
        **augmentation: Any,
    ) -> None:
        folder = setting.folder / path
        parts = folder / "train", folder / "val"
        layout = "train/<class>/*.JPEG and val/<class>/*.JPEG"
        origin = "https://image-net.org/download.php (ILSVRC 2012)"
        require(all(map(Path.is_dir, parts)), folder, layout, origin)
        classes = class_names(parts[0])
        files = [list_images([part / name for name in classes]) for part in parts]
        if setting.holdout:
            divided = divide(torch.tensor([label for _, label in files[0]]), setting.holdout)
            files = [[files[0][index] for index in part.tolist()] for part in divided]
        super().__init__(setting, len(files[0]), len(classes), IMAGENET, **augmentation)
        self._train, self._test = (_Folder(of_part, image, jitter, whole) for of_part in files)
        self._workers = int(workers)
        self._next_step = -1
        self._batches: Iterator[Pair] = iter(())

    def batch(self, step: int) -> Pair:
        """Return inputs and targets of a step. A step out of order restarts the workers."""
        if step != self._next_step:
            self._batches = self._load(self._train, map(self._draws, count(step)))
        self._next_step = step + 1
        return self._augmented(*next(self._batches), step)

    def _draws(self, step: int) -> list[Draw]:
        chosen = self._setting.indices(step, self.examples, torch.device("cpu")).tolist()
        return [(index, f"{self._setting.seed} {step} {index}") for index in chosen]

    def held_out(self) -> Iterator[Pair]:
        """Yield inputs and targets for evaluation."""
        setting = self._setting
        local = range(setting.rank, len(self._test.files), setting.ranks)
        batches = BatchSampler(local, setting.share, drop_last=False)
        for pair in self._load(self._test, ([(i, None) for i in batch] for batch in batches)):
            yield self._augmented(*pair)

    def _load(self, folder: _Folder, batches: Iterable[list[Draw]]) -> Iterator[Pair]:
        """Yield decoded images and their labels, on the device."""
        device = self._setting.device
        loader = DataLoader(
            folder,
            batch_sampler=batches,
            num_workers=self._workers,
            pin_memory=device.type == "cuda",
            # Workers use no random numbers. Without this, they would draw a seed from the global
            # generator, which training uses.
            generator=torch.Generator(),
        )
        try:
            for images, labels in loader:
                yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        except LabError as error:  # a worker's error contains its traceback
            raise LabError(str(error).rpartition("LabError: ")[2]) from error
