"""Small images that fit on the device: digits, CIFAR-100 and Tiny-ImageNet."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kronbit.lab.data.images import IMAGENET, DeviceImages, Pair, Setting
from kronbit.lab.errors import LabError, import_optional, lab_error

if TYPE_CHECKING:
    from PIL import Image

# The only names that a pickle of arrays needs.
_PICKLED = {
    *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
}


def require(exists: bool, path: Path, layout: str, origin: str) -> None:
    """Raise an error that names layout and origin if the data does not exist."""
    if not exists:
        raise LabError(
            f"no data at {path}: expected {layout}; get it from {origin}, and give the folder "
            "above it with --data or KRONBIT_DATA"
        )


def digits(setting: Setting, **augmentation: Any) -> DeviceImages:
    """Open scikit-learn's 1,797 digits of 8 x 8; 397, the same for any seed, are held out."""
    datasets = import_optional("sklearn.datasets", "scikit-learn", "data 'digits'")
    pixels, labels = map(torch.tensor, datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    # values from 0 to 16 become bytes from 0 to 240
    images = (pixels * 15).to(torch.uint8).view(-1, 1, 8, 8)
    parts = [(images[rows], labels[rows]) for rows in order.split((1400, 397))]
    return DeviceImages(setting, parts, 10, ((0.2872,), (0.3539,)), **augmentation)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles arrays, lists and dicts; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _PICKLED:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which images do not need")
        return super().find_class(module, name)


def read_cifar(path: Path) -> Pair:
    """Read images and labels from a file of CIFAR-100; other contents of a pickle are refused."""
    kinds = OSError, KeyError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError
    with lab_error(f"{path} is not a file of CIFAR-100's python version", *kinds):
        with path.open("rb") as file:
            content = _PlainUnpickler(file, encoding="bytes").load()
        images = torch.tensor(content[b"data"]).view(-1, 3, 32, 32)
        return images, torch.tensor(content[b"fine_labels"])


def cifar100(setting: Setting, **augmentation: Any) -> DeviceImages:
    """Open CIFAR-100: 50,000 images of 32 x 32, and 10,000 held-out ones."""
    folder = setting.folder / "cifar-100-python"
    files = folder / "train", folder / "test"
    origin = "https://www.cs.toronto.edu/~kriz/cifar.html"
    require(all(map(Path.is_file, files)), folder, "the files train and test", origin)
    normal = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return DeviceImages(setting, list(map(read_cifar, files)), 100, normal, **augmentation)


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, one per class."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def list_images(folders: Sequence[Path]) -> list[tuple[Path, int]]:
    """Return the images in one folder per class, with their labels."""
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"{folder} is missing: every class of train/ needs this folder")
    return [
        (path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in (".jpeg", ".jpg", ".png")
    ]


def open_picture(path: Path) -> Image.Image:
    """Decode an image file."""
    from PIL import Image

    with lab_error(f"cannot read the image {path}", OSError), Image.open(path) as image:
        picture: Image.Image = image.convert("RGB")
    return picture


def to_tensor(picture: Image.Image) -> Tensor:
    """Return the pixels as bytes (3, h, w)."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _read_images(files: Sequence[tuple[Path, int]]) -> Pair:
    with ThreadPoolExecutor() as pool:
        images = torch.stack(list(pool.map(lambda file: to_tensor(open_picture(file[0])), files)))
    return images, torch.tensor([label for _, label in files])


def tiny_imagenet(setting: Setting, **augmentation: Any) -> DeviceImages:
    """Open Tiny-ImageNet: 100,000 images of 64 x 64 in 200 classes, and 10,000 held-out ones."""
    folder = setting.folder / "tiny-imagenet-200"
    train, val = folder / "train", folder / "val"
    annotations = val / "val_annotations.txt"
    layout = "train/<class>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt"
    origin = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    require(train.is_dir() and annotations.is_file(), folder, layout, origin)
    labels = {name: label for label, name in enumerate(class_names(train))}
    test = []
    for line in annotations.read_text(encoding="utf-8").splitlines():
        file, name, *_ = [*line.split("\t"), ""]
        if name not in labels:
            raise LabError(f"{annotations}: {name!r} is not a class of train/")
        test.append((val / "images" / file, labels[name]))
    files = list_images([train / name / "images" for name in labels])
    parts = [_read_images(files), _read_images(test)]
    return DeviceImages(setting, parts, len(labels), IMAGENET, **augmentation)
