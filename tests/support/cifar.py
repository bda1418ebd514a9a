"""Write synthetic CIFAR-100 files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np


def write_cifar(folder: Path, images: int = 40) -> np.ndarray:
    """Write random images in CIFAR-100's format and return their pixels."""
    directory = folder / "cifar-100-python"
    directory.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (images, 3072), dtype=np.uint8)
    for name in ("train", "test"):
        content = {b"data": pixels, b"fine_labels": [i % 100 for i in range(images)]}
        (directory / name).write_bytes(pickle.dumps(content, protocol=2))
    return pixels
