"""Time the lab's image augmentation and kornia's on a GPU.

Usage::

    python benchmarks/speed/augmentation.py --output result.json

Batches are 128 x 3 x 32 x 32, on the device. kornia is skipped if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kronbit.lab.data.augment import Augmentation
from kronbit.lab.training.measures import hardware, versions

REPEATS, ROUNDS = 30, 5
CROP_FLIP_ERASE: dict[str, Any] = {"crop": 4, "flip": True, "erase": 0.25}
POLICIES: dict[str, dict[str, Any]] = {
    "RandAugment": {"policy": "rand"},
    "AutoAugment": {"policy": "auto"},
    "crop, flip, erase": CROP_FLIP_ERASE,
    "the recipes' for transformers": {
        **CROP_FLIP_ERASE,
        "policy": "auto",
        "mixup": 1.0,
        "cutmix": 1.0,
        "smoothing": 0.1,
    },
}


def milliseconds(function: Callable[[], Any]) -> float:
    """Return the milliseconds of a call: the median over rounds of ``REPEATS`` calls."""
    times = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPEATS):
            function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / REPEATS)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    images = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, 100, (128,), device="cuda")
    mean, std = (torch.full((3,), value, device="cuda") for value in (0.5, 0.25))
    generator = torch.Generator("cuda").manual_seed(0)
    report: dict[str, Any] = {
        "hardware": hardware(images.device),
        "versions": versions(),
        "milliseconds": {},
    }
    for name, options in POLICIES.items():
        augmentation = Augmentation(**options)
        report["milliseconds"][name] = milliseconds(
            lambda augmentation=augmentation: augmentation(
                images, labels, generator, mean, std, 100
            )
        )
    if importlib.util.find_spec("kornia") is not None:
        import kornia
        from kornia import augmentation as kornia_augmentation

        report["versions"]["kornia"] = kornia.__version__
        floats = images.float() / 255
        crop_flip_erase = torch.nn.Sequential(
            kornia_augmentation.RandomCrop((32, 32), padding=4),
            kornia_augmentation.RandomHorizontalFlip(),
            kornia_augmentation.RandomErasing(p=0.25),
        )
        for name, stage in (
            ("RandAugment", kornia_augmentation.auto.RandAugment(2, 9)),
            ("crop, flip, erase", crop_flip_erase),
        ):
            report["milliseconds"][f"kornia's {name}"] = milliseconds(
                lambda stage=stage: stage(floats)
            )
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["milliseconds"], indent=1))


if __name__ == "__main__":
    main()
