"""CIFAR-100 and Tiny-ImageNet in their published layouts."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronbit.lab.data.augment import Augmentation
from kronbit.lab.data.images import HeldImages, Setting
from kronbit.lab.errors import LabError

_CIFAR_MEAN, _CIFAR_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def missing(folder: Path, layout: str, origin: str) -> LabError:
    """Return the error for missing data."""
    return LabError(
        f"no data at {folder}: expected {layout}; get it from {origin}, and give the folder above "
        "it with --data or KRONBIT_DATA"
    )


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles arrays, lists and dicts; refuses everything else."""

    _allowed = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which images do not need")
        return super().find_class(module, name)


def read_cifar(path: Path) -> tuple[Tensor, Tensor]:
    """Read images and labels from a file of CIFAR-100; other contents of a pickle are refused."""
    try:
        with path.open("rb") as file:
            content = _PlainUnpickler(file, encoding="bytes").load()
        images = torch.tensor(content[b"data"]).view(-1, 3, 32, 32)
        return images, torch.tensor(content[b"fine_labels"])
    except (OSError, KeyError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise LabError(f"{path} is not a file of CIFAR-100's python version: {error}") from error


def cifar100(setting: Setting, **augmentation: Any) -> HeldImages:
    """Open CIFAR-100: 50,000 images of 32 x 32, and 10,000 held-out ones."""
    folder = setting.folder / "cifar-100-python"
    if not ((folder / "train").is_file() and (folder / "test").is_file()):
        layout = "the files train and test"
        raise missing(folder, layout, "https://www.cs.toronto.edu/~kriz/cifar.html")
    return HeldImages(
        setting,
        read_cifar(folder / "train"),
        read_cifar(folder / "test"),
        100,
        Augmentation(**augmentation),
        _CIFAR_MEAN,
        _CIFAR_STD,
    )


def _read_images(files: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
    """Decode image files, given with their labels."""
    with ThreadPoolExecutor() as pool:
        images = torch.stack(list(pool.map(_decode, [path for path, _ in files])))
    return images, torch.tensor([label for _, label in files])


def _decode(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except OSError as error:
        raise LabError(f"cannot read the image {path}: {error}") from error


def tiny_imagenet(setting: Setting, **augmentation: Any) -> HeldImages:
    """Open Tiny-ImageNet: 100,000 images of 64 x 64 in 200 classes, and 10,000 held-out ones."""
    folder = setting.folder / "tiny-imagenet-200"
    annotations = folder / "val" / "val_annotations.txt"
    if not ((folder / "train").is_dir() and annotations.is_file()):
        layout = "train/<class>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt"
        raise missing(folder, layout, "http://cs231n.stanford.edu/tiny-imagenet-200.zip")
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    labels = {name: label for label, name in enumerate(classes)}
    train = [
        (path, label)
        for name, label in labels.items()
        for path in sorted((folder / "train" / name / "images").glob("*.JPEG"))
    ]
    test = []
    for line in annotations.read_text(encoding="utf-8").splitlines():
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in labels:
            raise LabError(f"{annotations}: {name!r} is not a class of train/")
        test.append((folder / "val" / "images" / file, labels[name]))
    return HeldImages(
        setting,
        _read_images(train),
        _read_images(test),
        len(classes),
        Augmentation(**augmentation),
        IMAGENET_MEAN,
        IMAGENET_STD,
    )
