"""The digits of scikit-learn: 1,797 images of 8 x 8, without a download."""

from __future__ import annotations

from typing import Any

import torch

from kronbit.lab.data.augment import Augmentation
from kronbit.lab.data.images import HeldImages, Setting
from kronbit.lab.errors import LabError

TRAINED = 1400  # the rest is held out


def digits(setting: Setting, **augmentation: Any) -> HeldImages:
    """Open the digits. 397 of them are held out, the same for every seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LabError("the digits are part of scikit-learn: pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    # values from 0 to 16 become bytes from 0 to 240
    images = (torch.tensor(pixels)[order] * 15).to(torch.uint8).view(-1, 1, 8, 8)
    y = torch.tensor(labels)[order]
    return HeldImages(
        setting,
        (images[:TRAINED], y[:TRAINED]),
        (images[TRAINED:], y[TRAINED:]),
        10,
        Augmentation(**augmentation),
        mean=(0.2872,),
        std=(0.3539,),
    )
