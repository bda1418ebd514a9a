"""Augmentation of batches of images, on their device.

There is no loop over images, and the host never waits for the device. All randomness comes from the
caller's generator, so an augmented batch is a function of its seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from kronbit.lab.data import image_operations
from kronbit.lab.errors import LabError

ERASED_AREA = (0.02, 1 / 3)  # shares of the image's area; Zhong et al. 2020
ERASED_RATIO = 1 / 0.3  # maximum ratio of the sides
# Uniform numbers per image for placing, the policy, erasing and mixing.
_DRAWS = (3, image_operations.DRAWS, 5, 4)


@dataclass(frozen=True)
class Augmentation:
    """Augmentations of training images, in this order. The default is only to normalise.

    The share with which images are mixed is drawn from Beta(mixup, mixup), and the area of
    rectangles that are pasted from other images from Beta(cutmix, cutmix); 0 disables either. If
    both are set, each image is mixed in one of the two ways.
    """

    crop: int = 0  # width of a border of zeros, added before a random crop to the old size
    flip: bool = False  # mirror half of the images
    policy: str | None = None  # rand (RandAugment) or auto (AutoAugment's policy for CIFAR-10)
    erase: float = 0.0  # probability that a rectangle becomes noise
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    smoothing: float = 0.0  # label smoothing of mixed batches; the loss smooths plain labels

    def __post_init__(self) -> None:
        known = image_operations.POLICIES
        if self.policy not in (None, *known):
            raise LabError(f"policy must be one of {', '.join(known)}; got {self.policy!r}")
        for name in ("erase", "mix_probability", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise LabError(f"{name} must be from 0 to 1; got {getattr(self, name)}")
        for name in ("crop", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise LabError(f"{name} must not be negative; got {getattr(self, name)}")

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        generator: torch.Generator,
        mean: Tensor,
        std: Tensor,
        classes: int,
    ) -> tuple[Tensor, Tensor]:
        """Augment images (b, c, h, w), from 0 to 255, bytes or floats, with labels (b,).

        ``mean`` and ``std`` of each channel are for values from 0 to 1.

        Returns:
            Normalised images in float32, and targets: the labels, or, if images are mixed,
            probabilities (b, classes).
        """
        rows = torch.rand(sum(_DRAWS), len(images), generator=generator, device=images.device)
        placing, policy, erasing, mixing = rows.split(_DRAWS)
        x = self._placed(images, placing).float()
        if self.policy is not None:
            fill = (255 * mean).round()  # 0 after the normalisation
            for choice in image_operations.POLICIES[self.policy](policy):
                x = image_operations.apply(x, choice, fill)
        x = (x / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
        if self.erase:
            x = self._erased(x, erasing, generator)
        if self.mixup or self.cutmix:
            return self._mixed(x, labels, classes, mixing, generator)
        return x, labels

    def _placed(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Crop and mirror images, by one lookup."""
        if not (self.crop or self.flip):
            return images
        (b, c, h, w), device = images.shape, images.device
        images = functional.pad(images, (self.crop,) * 4)
        top, left = (drawn[:2] * (2 * self.crop + 1)).long()[:, :, None]
        columns = _count(w, device)
        if self.flip:
            columns = torch.where(drawn[2, :, None] < 0.5, w - 1 - columns, columns)
        image, channel = _count(b, device).view(-1, 1, 1, 1), _count(c, device).view(-1, 1, 1)
        y, x = (top + _count(h, device))[:, None, :, None], (left + columns)[:, None, None]
        return images[image, channel, y, x]

    def _erased(self, x: Tensor, drawn: Tensor, generator: torch.Generator) -> Tensor:
        """Replace a rectangle of some images by noise."""
        sides = _column(tuple(x.shape[2:]), x.device)
        low, high = ERASED_AREA
        area = (drawn[0] * (high - low) + low) * (x.shape[2] * x.shape[3])
        span = 2 * math.log(ERASED_RATIO)
        # height to width, and width to height
        ratio = ((drawn[1] - 0.5) * _column((span, -span), x.device)).exp_()
        size = (ratio * area).sqrt_().round_().clamp_(min=1).minimum(sides)
        start = (drawn[2:4] * (sides + 1 - size)).floor_()
        end = start + size * (drawn[4] < self.erase)
        noise = torch.empty_like(x).normal_(generator=generator)
        return torch.where(_within(x, start, end), noise, x)

    def _mixed(
        self, x: Tensor, labels: Tensor, classes: int, drawn: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Mix each image with its counterpart in the reversed batch."""
        pastes = drawn[0] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        # Beta(a, a) is X / (X + Y) for two gamma variables; torch's Beta takes no generator.
        shape = (pastes * (self.cutmix - self.mixup) + self.mixup).repeat(2, 1)
        gamma = torch._standard_gamma(shape, generator=generator)
        first, second = gamma.clamp_(min=torch.finfo(gamma.dtype).tiny)
        kept = torch.where(drawn[1] < self.mix_probability, first / (first + second), 1.0)
        # The rectangle has the other image's share of the area; it is empty for mixup.
        sides = _column(tuple(x.shape[2:]), x.device)
        half = ((1 - kept).sqrt_() * pastes * sides).div_(2, rounding_mode="floor")
        centre = (drawn[2:4] * sides).floor_()
        elsewhere = torch.where(pastes, 1.0, kept).view(-1, 1, 1, 1)
        keep = torch.where(_within(x, centre - half, centre + half), 0.0, elsewhere)
        share = keep.mean((1, 2, 3))  # a rectangle may extend beyond the image
        rest = self.smoothing / classes
        targets = torch.full((len(x), classes), rest, dtype=x.dtype, device=x.device)
        targets.scatter_(1, labels[:, None], 1 - self.smoothing + rest)
        return torch.lerp(x.flip(0), x, keep), torch.lerp(targets.flip(0), targets, share[:, None])


def _within(x: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Return a mask (b, 1, h, w) of the pixels in each image's rectangle, with corners (2, b)."""
    (top, left), (bottom, right) = start[..., None, None, None], end[..., None, None, None]
    y, across = _count(x.shape[2], x.device)[:, None], _count(x.shape[3], x.device)
    mask: Tensor = (y >= top) & (y < bottom) & (across >= left) & (across < right)
    return mask


# Cached on the device, as a copy to the device would make the host wait.


@lru_cache
def _count(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


@lru_cache
def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
