"""Operations of AutoAugment and RandAugment on batches, with a different one for each image.

They follow PIL, on whole numbers from 0 to 255. Every operation runs on every image, with the
image's parameters from a table; parameters that do not belong to the image's operation are neutral.
So there is no loop over images, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor
from torch.nn import functional

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
NEUTRAL: dict[str, float] = _DATA["neutral"]
OPERATIONS: dict[str, dict[str, Sequence[float]]] = _DATA["operations"]
AUTO: Sequence[Sequence[tuple[str, float, float]]] = _DATA["auto"]
NAMES = tuple(OPERATIONS)
# RandAugment (Cubuk et al. 2020): two of all operations except the last, at magnitude 9 of 10.
RAND_OPERATIONS, RAND_STAGES, RAND_STRENGTH = len(NAMES) - 1, 2, 0.9


class Choice(NamedTuple):
    """The operation for each image of a batch; all tensors are of shape (b,)."""

    operation: Tensor  # index into ``NAMES``
    strength: Tensor  # from 0 to 1
    signed: Tensor  # the strength with a random sign


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

    Images (b, c, h, w) hold whole numbers from 0 to 255 in float32; ``fill`` is the color outside.
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
    sides, half_of_other, scale, sign, along, beside = _frame(*x.shape[2:], x.device)
    start = torch.addcmul((translate * sides).round_(), shear, half_of_other)
    slope = torch.addcmul(shear, turn.sin(), sign)
    place = torch.addcmul(torch.addcmul(start, turn.cos(), along), slope, beside)
    grid = (place * scale).permute(0, 2, 3, 1)
    # Samples outside of the image are 0, so the difference from the fill is sampled.
    return functional.grid_sample(x - fill, grid, mode="nearest", align_corners=False) + fill


def _blend(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """Blend with black, gray, the mean gray or the smoothed image; or extrapolate away from it."""
    gray = x
    if x.shape[1] == 3:  # PIL's integer weights
        red, green, blue = x.split(1, dim=1)
        weighted = 19595 * red + 38470 * green + 7471 * blue
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
    """Stretch each channel to the range 0 to 255, or equalise its histogram."""
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


# Tables are cached on the device, as a copy to the device would make the host wait.


@lru_cache
def _frame(h: int, w: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors of x and y: (2, 1, 1) for the image, then (2, h, w) for its pixels.

    For the image: the sides, half of the other side, the scale from pixels to half sides, and the
    sign of a rotation. For pixels: positions relative to the centre along the axis and beside it.
    """
    across, down = (torch.arange(side, device=device) + (0.5 - side / 2) for side in (w, h))
    down, across = torch.meshgrid(down, across, indexing="ij")
    sides = torch.tensor([float(w), float(h)], device=device).view(2, 1, 1)
    sign = torch.tensor([-1.0, 1.0], device=device).view(2, 1, 1)
    along, beside = torch.stack((across, down)), torch.stack((down, across))
    return sides, sides.flip(0) / 2, 2 / sides, sign, along, beside


@lru_cache
def _operation_table(device: torch.device) -> Tensor:
    """Return a table (operations, 3, parameters)."""
    terms = [[by.get(name, (0, 0, 0)) for name in NEUTRAL] for by in OPERATIONS.values()]
    table = torch.tensor(terms, dtype=torch.float32).mT.contiguous()
    table[:, 0] += torch.tensor(list(NEUTRAL.values()))
    return table.to(device)


@lru_cache
def _auto_table(device: torch.device) -> Tensor:
    """Return a table (pairs, 2, 3) of operation, probability and strength."""
    rows = [[(NAMES.index(name), p, level / 9) for name, p, level in pair] for pair in AUTO]
    return torch.tensor(rows, dtype=torch.float32, device=device)
