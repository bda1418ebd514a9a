"""Large images in one folder per class, such as ImageNet, decoded by worker processes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kronbit.lab.data.augment import Augmentation
from kronbit.lab.data.holdout import divide
from kronbit.lab.data.images import Setting
from kronbit.lab.data.pictures import IMAGENET_MEAN, IMAGENET_STD, missing
from kronbit.lab.errors import LabError

if TYPE_CHECKING:
    from PIL.Image import Image


class _Draw(NamedTuple):
    """An image of a step, and the seed of its augmentation."""

    image: int
    key: str


class _Folder(Dataset[tuple[Tensor, int]]):
    """Decodes and crops single images. All randomness comes from the key of the draw."""

    def __init__(
        self, files: list[tuple[Path, int]], image: int, jitter: float, whole: float
    ) -> None:
        self.files, self.image, self.jitter, self.whole = files, image, jitter, whole

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, draw: _Draw | int) -> tuple[Tensor, int]:
        import numpy as np
        from PIL import Image

        index = draw if isinstance(draw, int) else draw.image
        path, label = self.files[index]
        try:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
        except OSError as error:
            raise OSError(f"{path}: {error}") from error
        if isinstance(draw, int):
            picture = self._centre(picture)
        else:
            chance = random.Random(draw.key)
            picture = self._jittered(self._random_crop(picture, chance), chance)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1), label

    def _random_crop(self, picture: Image, chance: random.Random) -> Image:
        """Crop 8 to 100 % of the area, at a ratio of 3:4 to 4:3, and resize the crop."""
        width, height = picture.size
        w, h = min(width, height), min(width, height)
        for _ in range(10):
            area = chance.uniform(0.08, 1.0) * width * height
            ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                break
            w, h = min(width, height), min(width, height)
        left, top = chance.randint(0, width - w), chance.randint(0, height - h)
        return picture.resize(
            (self.image, self.image), box=(left, top, left + w, top + h), resample=2
        )

    def _jittered(self, picture: Image, chance: random.Random) -> Image:
        """Change brightness, contrast and colour at random."""
        from PIL import ImageEnhance

        if self.jitter:
            for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
                amount = chance.uniform(1 - self.jitter, 1 + self.jitter)
                picture = kind(picture).enhance(amount)
        return picture

    def _centre(self, picture: Image) -> Image:
        """Crop the central square whose side is ``whole`` times the shorter side."""
        width, height = picture.size
        side = self.whole * min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return picture.resize(
            (self.image, self.image), box=(left, top, left + side, top + side), resample=2
        )


class FolderImages:
    """Batches of a folder's images, which workers decode ahead of time."""

    classifies = True

    def __init__(
        self,
        setting: Setting,
        train: _Folder,
        test: _Folder,
        outputs: int,
        augmentation: Augmentation,
        workers: int,
    ) -> None:
        self._setting, self._train, self._test = setting, train, test
        self._augment, self._workers, self.outputs = augmentation, workers, outputs
        self.examples = len(train)
        if setting.batch > self.examples:
            raise LabError(
                f"batch={setting.batch} is larger than the {self.examples} training images: "
                "--set batch=..."
            )
        device = setting.device
        self._mean = torch.tensor(IMAGENET_MEAN, device=device)
        self._std = torch.tensor(IMAGENET_STD, device=device)
        self._next: tuple[int, Iterator[Any]] | None = None

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step. A step out of order restarts the workers."""
        if self._next is None or self._next[0] != step:
            self._next = (step, iter(self._loader(self._train, self._draws(step))))
        try:
            images, labels = next(self._next[1])
        except OSError as error:  # from a worker: its last line names the file
            raise LabError(f"cannot read an image: {str(error).splitlines()[-1]}") from error
        self._next = (step + 1, self._next[1])
        return self._on_device(images, labels, self._augment, step)

    def _draws(self, step: int) -> Iterator[list[_Draw]]:
        """Yield the draws of each step from ``step`` on."""
        setting = self._setting
        for at in range(step, 2**62):
            chosen = setting.indices(at, self.examples, torch.device("cpu")).tolist()
            yield [_Draw(index, f"{setting.seed} {at} {index}") for index in chosen]

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets for evaluation."""
        setting = self._setting
        local = range(setting.rank, len(self._test), setting.ranks)
        share = max(1, setting.batch // setting.ranks)
        batches = [list(local[i : i + share]) for i in range(0, len(local), share)]
        for images, labels in self._loader(self._test, batches):
            yield self._on_device(images, labels, Augmentation(), 0)

    def _loader(self, folder: _Folder, batches: Any) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            folder,
            batch_sampler=batches,
            num_workers=self._workers,
            pin_memory=self._setting.device.type == "cuda",
            # Workers use no random numbers. Without this, they would draw a seed from the global
            # generator, which the training uses.
            generator=torch.Generator(),
        )

    def _on_device(
        self, images: Tensor, labels: Tensor, augment: Augmentation, step: int
    ) -> tuple[Tensor, Tensor]:
        device = self._setting.device
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        generator = self._setting.generator(step, device)
        return augment(images, labels, generator, self._mean, self._std, self.outputs)


def _list_images(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Return the images of each class, with their labels."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in (".jpeg", ".jpg", ".png")
    ]


def image_folder(
    setting: Setting,
    path: str = "imagenet",
    image: int = 224,
    jitter: float = 0.0,
    whole: float = 0.875,
    workers: int = 8,
    **augmentation: Any,
) -> FolderImages:
    """Open images in ``train/<class>/`` and ``val/<class>/``.

    Args:
        setting: Options that all data sets share.
        path: The folder, below the data folder.
        image: Side of the network's inputs.
        jitter: Maximum relative change of brightness, contrast and colour.
        whole: Share of the shorter side that evaluation uses.
        workers: Number of processes that decode images.
        **augmentation: Options of ``Augmentation``.
    """
    folder = setting.folder / path
    if not ((folder / "train").is_dir() and (folder / "val").is_dir()):
        layout = "train/<class>/*.JPEG and val/<class>/*.JPEG"
        raise missing(folder, layout, "https://image-net.org/download.php (ILSVRC 2012)")
    classes = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    try:
        parts = [_list_images(folder / part, classes) for part in ("train", "val")]
    except FileNotFoundError as error:
        raise LabError(f"{folder}: a class of train/ is missing in val/: {error}") from error
    if setting.holdout:
        divided = divide(torch.tensor([label for _, label in parts[0]]), setting.holdout)
        parts = [[parts[0][index] for index in part.tolist()] for part in divided]
    train, test = (_Folder(files, image, jitter, whole) for files in parts)
    return FolderImages(
        setting, train, test, len(classes), Augmentation(**augmentation), int(workers)
    )
