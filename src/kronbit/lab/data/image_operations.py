"""Operations of AutoAugment and RandAugment on batches, with a different one for each image.

They follow PIL, on whole numbers from 0 to 255. Every operation runs on every image, with the
image's parameters from a table; parameters that do not belong to the image's operation are neutral.
So there is no loop over images, and the host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Neutral values of the parameters, which leave an image unchanged.
NEUTRAL = {
    "shear_x": 0.0,  # these five come first, in this order
    "shear_y": 0.0,
    "translate_x": 0.0,  # share of the side
    "translate_y": 0.0,
    "turn": 0.0,  # radians, counterclockwise
    "factor": 1.0,  # weight of the image; the rest is blended in, by default black
    "gray": 0.0,
    "mean": 0.0,
    "smooth": 0.0,
    "lost_bits": 0.0,
    "threshold": 256.0,  # values of at least this are inverted
    "autocontrast": 0.0,
    "equalize": 0.0,
}
# Terms that an operation adds to a parameter: a constant, a factor of the strength, and a factor of
# the strength with a random sign. Strength 1 is the maximum in AutoAugment's paper (Cubuk et al.
# 2019).
OPERATIONS: dict[str, dict[str, tuple[float, float, float]]] = {
    "identity": {},
    "shear-x": {"shear_x": (0, 0, 0.3)},
    "shear-y": {"shear_y": (0, 0, 0.3)},
    "translate-x": {"translate_x": (0, 0, 150 / 331)},
    "translate-y": {"translate_y": (0, 0, 150 / 331)},
    "rotate": {"turn": (0, 0, math.radians(30))},
    "brightness": {"factor": (0, 0, 0.9)},
    "color": {"factor": (0, 0, 0.9), "gray": (1, 0, 0)},
    "contrast": {"factor": (0, 0, 0.9), "mean": (1, 0, 0)},
    "sharpness": {"factor": (0, 0, 0.9), "smooth": (1, 0, 0)},
    "posterize": {"lost_bits": (0, 4, 0)},
    "solarize": {"threshold": (0, -256, 0)},
    "autocontrast": {"autocontrast": (1, 0, 0)},
    "equalize": {"equalize": (1, 0, 0)},
    "invert": {"threshold": (-256, 0, 0)},
}
NAMES = tuple(OPERATIONS)

# RandAugment (Cubuk et al. 2020): two of all operations except the last, at magnitude 9 of 10.
RAND_OPERATIONS, RAND_STAGES, RAND_STRENGTH = len(NAMES) - 1, 2, 0.9
# AutoAugment's policy for CIFAR-10, from the paper's appendix. Each image gets one of these pairs
# of (operation, probability, magnitude from 0 to 9).
AUTO = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate-x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear-y", 0.5, 8), ("translate-y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear-y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate-x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate-y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate-y", 0.9, 9), ("translate-y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate-y", 0.7, 9), ("autocontrast", 0.9, 1)),
)


class Choice(NamedTuple):
    """The operation for each image of a batch; all tensors are of shape (b,).

    Attributes:
        operation: Index into ``NAMES``.
        strength: Strength from 0 to 1.
        signed: The strength with a random sign.
    """

    operation: Tensor
    strength: Tensor
    signed: Tensor


def rand(drawn: Tensor) -> Iterator[Choice]:
    """Yield RandAugment's choices, given uniform numbers (``DRAWS``, b)."""
    strength = torch.full_like(drawn[0], RAND_STRENGTH)
    for which, sign in drawn[: 2 * RAND_STAGES].view(RAND_STAGES, 2, -1):
        operation = (which * RAND_OPERATIONS).long()
        yield Choice(operation, strength, strength.copysign(sign - 0.5))


def auto(drawn: Tensor) -> Iterator[Choice]:
    """Yield AutoAugment's choices, given uniform numbers (``DRAWS``, b)."""
    pairs = _auto_table(drawn.device).index_select(0, (drawn[0] * len(AUTO)).long())
    each = zip(pairs.permute(1, 2, 0), drawn[1:].view(2, 2, -1), strict=True)
    for (operation, probability, strength), (chance, sign) in each:
        happens = chance < probability
        yield Choice((operation * happens).long(), strength, strength.copysign(sign - 0.5))


DRAWS = 5  # uniform numbers in [0, 1) for each image, enough for either policy
POLICIES: dict[str, Callable[[Tensor], Iterator[Choice]]] = {"rand": rand, "auto": auto}


def apply(images: Tensor, choice: Choice, fill: Tensor) -> Tensor:
    """Apply to each image the operation that was chosen for it.

    Args:
        images: (b, c, h, w), whole numbers from 0 to 255 in float32.
        choice: Operations and strengths.
        fill: Colour (c,) outside of the image.
    """
    rows = _operation_table(images.device).index_select(0, choice.operation)
    values = torch.addcmul(rows[:, 0], rows[:, 1], choice.strength[:, None])
    values = torch.addcmul(values, rows[:, 2], choice.signed[:, None])[:, :, None, None]
    parameters = dict(zip(NEUTRAL, values[:, :, None].unbind(1), strict=True))  # (b, 1, 1, 1) each
    x = _move(images, values[:, 0:2], values[:, 2:4], values[:, 4:5], fill.view(-1, 1, 1))
    x = _blend(x, parameters)
    step = parameters["lost_bits"].round().exp2()
    x = x.div(step, rounding_mode="floor") * step
    x = torch.where(x < parameters["threshold"], x, 255 - x)
    return _spread(x, parameters)


def _move(x: Tensor, shear: Tensor, translate: Tensor, turn: Tensor, fill: Tensor) -> Tensor:
    """Shear about the corner, translate by whole pixels, rotate about the centre; nearest pixels.

    Shears and translations are (b, 2, 1, 1), along x and along y.
    """
    frame = _frame(x.shape[2], x.shape[3], x.device)
    start = torch.addcmul((translate * frame.sides).round_(), shear, frame.half_of_other)
    slope = torch.addcmul(shear, turn.sin(), frame.sign)
    place = torch.addcmul(torch.addcmul(start, turn.cos(), frame.along), slope, frame.beside)
    grid = (place * frame.scale).permute(0, 2, 3, 1)
    # Samples outside of the image are 0, so the difference from the fill is sampled.
    return functional.grid_sample(x - fill, grid, mode="nearest", align_corners=False) + fill


def _blend(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """Blend with black, gray, the mean gray or the smoothed image; or extrapolate away from it."""
    gray = x
    if x.shape[1] == 3:  # PIL's integer weights
        weighted = (x * _gray_weights(x.device)).sum(1, keepdim=True)
        gray = (weighted + 32768).div(65536, rounding_mode="floor")
    mean = (gray.mean((1, 2, 3), keepdim=True) + 0.5).floor()
    smooth = x.clone()  # the border is not smoothed
    inner = smooth[:, :, 1:-1, 1:-1]
    around = functional.avg_pool2d(x, 3, 1, divisor_override=1)
    inner.copy_(around.add_(inner, alpha=4).add_(6).div_(13, rounding_mode="floor"))
    other = torch.addcmul(gray * parameters["gray"], mean, parameters["mean"])
    other = torch.addcmul(other, smooth, parameters["smooth"])
    return torch.addcmul(other, x - other, parameters["factor"]).clamp_(0, 255).floor_()


def _spread(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """Stretch each channel to 0 and 255, or equalise its histogram."""
    flat = x.flatten(2)
    low, high = flat.aminmax(dim=2, keepdim=True)
    span = (high - low) * parameters["autocontrast"].squeeze(1)
    stretched = ((flat - low) * 255).div_(span.clamp(min=1), rounding_mode="floor")
    index = flat.long()
    counts = x.new_zeros(*x.shape[:2], 256).scatter_(2, index, 1.0, reduce="add")
    brightest = counts.gather(2, high.long())
    step = (flat.shape[2] - brightest).div_(255, rounding_mode="floor")
    step = step * parameters["equalize"].squeeze(1)
    # The number of darker pixels and half a step, measured in steps.
    level = torch.add(counts.cumsum(2) - counts, step, alpha=0.5)
    level = level.div_(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    flat = torch.where(span > 0, stretched, flat)
    return torch.where(step > 0, level.gather(2, index), flat).view_as(x)


class _Frame(NamedTuple):
    """Positions of pixels relative to the centre, for x and y: (2, 1, 1) or (2, h, w)."""

    sides: Tensor
    half_of_other: Tensor
    scale: Tensor  # from pixels to half sides
    sign: Tensor
    along: Tensor
    beside: Tensor


# Tables are cached on the device, as a copy to the device would make the host wait.


@lru_cache
def _frame(h: int, w: int, device: torch.device) -> _Frame:
    across, down = (torch.arange(side, device=device) + (0.5 - side / 2) for side in (w, h))
    down, across = torch.meshgrid(down, across, indexing="ij")
    sides = torch.tensor([float(w), float(h)], device=device).view(2, 1, 1)
    sign = torch.tensor([-1.0, 1.0], device=device).view(2, 1, 1)
    along, beside = torch.stack((across, down)), torch.stack((down, across))
    return _Frame(sides, sides.flip(0) / 2, 2 / sides, sign, along, beside)


@lru_cache
def _operation_table(device: torch.device) -> Tensor:
    """Return a table (operations, 3, parameters)."""
    rows = []
    for changes in OPERATIONS.values():
        added = [changes.get(name, (0, 0, 0)) for name in NEUTRAL]
        always = [by[0] + value for by, value in zip(added, NEUTRAL.values(), strict=True)]
        rows.append([always, [by[1] for by in added], [by[2] for by in added]])
    return torch.tensor(rows, dtype=torch.float32, device=device)


@lru_cache
def _auto_table(device: torch.device) -> Tensor:
    """Return a table (pairs, 2, 3) of operation, probability and strength."""
    rows = [[(NAMES.index(name), p, level / 9) for name, p, level in pair] for pair in AUTO]
    return torch.tensor(rows, dtype=torch.float32, device=device)


@lru_cache
def _gray_weights(device: torch.device) -> Tensor:
    return torch.tensor([19595.0, 38470.0, 7471.0], device=device).view(3, 1, 1)
