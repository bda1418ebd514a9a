"""Augmented batches match PIL image by image, and pixels have the expected statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.numerics import no_host_sync
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kronbit.lab.data import image_operations
from kronbit.lab.data.augment import Augmentation
from kronbit.lab.data.image_operations import AUTO, NAMES, Choice
from kronbit.lab.errors import LabError

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.25])
FILL = (100, 50, 200)
EVERYTHING = Augmentation(
    crop=4, flip=True, policy="auto", erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1
)


def pictures(count: int, side: int = 32, channels: int = 3) -> Tensor:
    """Return smooth images, as photographs are, with several ranges of brightness."""
    rough = torch.rand(count, channels, side // 4, side // 4)
    x = torch.nn.functional.interpolate(rough, size=(side, side), mode="bicubic")
    span = torch.rand(count, channels, 1, 1)
    return (255 * (x * span + torch.rand(count, channels, 1, 1) * (1 - span))).clamp(0, 255).byte()


def augmented(augmentation: Augmentation, images: Tensor, labels: Tensor, **given: Any) -> Any:
    options = {"seed": 0, "mean": MEAN, "std": STD, "classes": 10, **given}
    device = images.device
    generator = torch.Generator(device).manual_seed(options["seed"])
    mean, std = options["mean"].to(device), options["std"].to(device)
    return augmentation(images, labels, generator, mean, std, options["classes"])


def pil_operation(name: str, amount: float) -> Callable[[Any], Any]:
    """Return PIL's operation with this amount, a signed strength."""
    from PIL import Image, ImageEnhance, ImageOps

    def affine(*matrix: float) -> Callable[[Any], Any]:
        return lambda image: image.transform(
            image.size, Image.Transform.AFFINE, matrix, fillcolor=FILL
        )

    pixels = round(amount * 150 / 331 * 32)
    return {
        "identity": lambda image: image,
        "shear-x": affine(1, 0.3 * amount, 0, 0, 1, 0),
        "shear-y": affine(1, 0, 0, 0.3 * amount, 1, 0),
        "translate-x": affine(1, 0, pixels, 0, 1, 0),
        "translate-y": affine(1, 0, 0, 0, 1, pixels),
        "rotate": lambda image: image.rotate(30 * amount, fillcolor=FILL),
        "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1 + 0.9 * amount),
        "color": lambda image: ImageEnhance.Color(image).enhance(1 + 0.9 * amount),
        "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1 + 0.9 * amount),
        "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * amount),
        "posterize": lambda image: ImageOps.posterize(image, 8 - round(4 * abs(amount))),
        "solarize": lambda image: ImageOps.solarize(image, 256 - 256 * abs(amount)),
        "autocontrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
        "invert": ImageOps.invert,
    }[name]


def augmented_by_pil(images: Tensor, name: str, amounts: list[float]) -> Tensor:
    import numpy as np
    from PIL import Image

    results = []
    for image, amount in zip(images, amounts, strict=True):
        result = pil_operation(name, amount)(Image.fromarray(image.permute(1, 2, 0).numpy()))
        results.append(torch.from_numpy(np.array(result)).permute(2, 0, 1))
    return torch.stack(results).float()


@pytest.mark.parametrize("name", NAMES)
def test_each_operation_matches_pil(name: str, device: torch.device) -> None:
    """Other images in the batch, with other operations, do not change the result."""
    pytest.importorskip("PIL")
    strengths = torch.tensor([0.0, 0.2, 0.5, 0.75, 0.9, 1.0]).repeat(4)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(12)
    images = pictures(24)
    images[3] = 77  # constant: it has no contrast to stretch
    others = torch.arange(24) % len(NAMES)
    operations = torch.cat((torch.full((24,), NAMES.index(name)), others))
    choice = Choice(operations, strengths.repeat(2), (strengths * signs).repeat(2))
    actual = image_operations.apply(
        images.repeat(2, 1, 1, 1).float().to(device),
        Choice(*(part.to(device) for part in choice)),
        torch.tensor(FILL, dtype=torch.float32, device=device),
    )[:24].cpu()
    expected = augmented_by_pil(images, name, (strengths * signs).tolist())
    assert torch.equal(actual, actual.round())
    assert actual.amin() >= 0
    assert actual.amax() <= 255
    if name in ("shear-x", "shear-y", "rotate"):  # halfway between two pixels, either is nearest
        assert (actual != expected).float().mean() < 0.005
    else:
        limit = 0 if name in ("identity", "translate-x", "translate-y", "equalize") else 1
        assert (actual - expected).abs().max() <= limit
        # Few pixels are rounded differently; a GPU fuses multiplications and additions.
        assert (actual != expected).float().mean() < (0.01 if device.type == "cpu" else 0.05)
    if name != "identity":
        assert (actual[5] != images[5].float()).float().mean() > 0.1  # full strength changes pixels


def test_color_leaves_gray_images_unchanged() -> None:
    images = pictures(2, 8, channels=1).float()
    choice = Choice(torch.full((2,), NAMES.index("color")), torch.ones(2), torch.ones(2))
    assert torch.equal(image_operations.apply(images, choice, torch.zeros(1)), images)


def test_the_default_only_normalises(device: torch.device) -> None:
    images, labels = pictures(5).to(device), torch.arange(5, device=device)
    x, y = augmented(Augmentation(), images, labels)
    mean, std = MEAN.to(device)[:, None, None], STD.to(device)[:, None, None]
    assert torch.equal(y, labels)
    torch.testing.assert_close(x, (images.double() / 255 - mean).div(std).float())
    assert torch.equal(augmented(Augmentation(), images.float(), labels)[0], x)


def test_augmentation_is_a_function_of_the_seed(device: torch.device) -> None:
    images, labels = pictures(16).to(device), torch.arange(16, device=device) % 10
    for policy in ("rand", "auto"):
        whole = Augmentation(**{**EVERYTHING.__dict__, "policy": policy})
        (x, y), (again, same) = (augmented(whole, images, labels) for _ in range(2))
        assert torch.equal(x, again)
        assert torch.equal(y, same)
        torch.manual_seed(5)  # the global generator is not used
        assert torch.equal(x, augmented(whole, images, labels)[0])
        assert not torch.equal(x, augmented(whole, images, labels, seed=1)[0])


def plain(augmentation: Augmentation, images: Tensor) -> Tensor:
    """Return augmented images with values from 0 to 255."""
    labels = torch.zeros(len(images), dtype=torch.int64)
    one, none = torch.ones(images.shape[1]), torch.zeros(images.shape[1])
    x, _ = augmented(augmentation, images, labels, mean=none, std=one)
    return (255 * x).round()


def test_crops_and_flips_are_uniform() -> None:
    count = 6000
    images = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).repeat(count, 1, 1, 1)
    bordered = torch.nn.functional.pad(images[0].float(), (2, 2, 2, 2))
    views = {
        (top, left, mirrored): (part.flip(2) if mirrored else part).flatten().tolist()
        for top in range(5)
        for left in range(5)
        for mirrored in (False, True)
        for part in (bordered[:, top : top + 8, left : left + 8],)
    }
    names = {tuple(pixels): view for view, pixels in views.items()}
    drawn = [
        names[tuple(pixels)] for pixels in plain(Augmentation(2, True), images).flatten(1).tolist()
    ]
    counts = torch.tensor([drawn.count(view) for view in views])
    assert (counts - count / 50).abs().max() < 5 * math.sqrt(count / 50)


def test_policies_draw_operations_as_in_their_tables() -> None:
    drawn = torch.rand(image_operations.DRAWS, 50_000)
    first, second = image_operations.auto(drawn)
    for number, pair in enumerate(AUTO):
        chosen = (drawn[0] * len(AUTO)).long() == number
        for choice, (name, probability, level) in zip((first, second), pair, strict=True):
            share = (choice.operation[chosen] == NAMES.index(name)).float().mean()
            assert share == pytest.approx(probability, abs=0.06)
            assert (
                (choice.operation[chosen] == 0) | (choice.operation[chosen] == NAMES.index(name))
            ).all()
            assert choice.strength[chosen].unique().tolist() == pytest.approx([level / 9])
    assert first.signed.sign().mean() == pytest.approx(0.0, abs=0.02)
    for choice in image_operations.rand(drawn):
        shares = choice.operation.bincount(minlength=len(NAMES)) / 50_000
        assert shares[-1] == 0  # this policy never inverts
        assert shares[:-1].tolist() == pytest.approx([1 / 14] * 14, abs=0.006)
        assert choice.strength.unique().tolist() == pytest.approx([0.9])


def test_erasing_replaces_one_rectangle_of_some_images() -> None:
    count = 2000
    images = torch.full((count, 3, 16, 16), 128, dtype=torch.uint8)
    labels = torch.zeros(count, dtype=torch.int64)
    x, _ = augmented(Augmentation(erase=0.25), images, labels)
    erased = (x != x[:, :, :1, :1].mode(0).values).all(1)
    has_hole = erased.flatten(1).any(1)
    assert has_hole.float().mean() == pytest.approx(0.25, abs=0.04)
    rows, columns = erased.any(2)[has_hole], erased.any(1)[has_hole]
    assert torch.equal(erased[has_hole], rows[:, :, None] & columns[:, None, :])
    for edge in (rows, columns):  # without gaps
        assert (edge.int().diff(prepend=torch.zeros(len(edge), 1), dim=1) == 1).sum(1).max() == 1
    share = erased[has_hole].float().mean((1, 2))
    assert share.min() > 0.015
    assert share.max() < 0.36
    assert share.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    noise = x.permute(0, 2, 3, 1)[erased]
    assert noise.mean() == pytest.approx(0.0, abs=0.02)
    assert noise.std() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}]
)
def test_targets_match_the_shares_of_pixels(
    options: dict[str, float], device: torch.device
) -> None:
    """Image k has label k and the constant value k, so pixels show the shares."""
    count = 200
    images = torch.arange(count, device=device).byte().view(-1, 1, 1, 1).expand(-1, 3, 16, 16)
    labels = torch.arange(count, device=device)
    given = {"classes": count, "mean": torch.zeros(3), "std": torch.ones(3)}
    x, y = augmented(Augmentation(**options), images, labels, **given)
    torch.testing.assert_close(y.sum(1), torch.ones(count, device=device))
    values = torch.arange(count, device=device).float()
    torch.testing.assert_close(255 * x.mean((1, 2, 3)), y @ values, rtol=1e-4, atol=1e-3)
    label_share = y.gather(1, labels[:, None]).squeeze(1)
    constant = (x == x[:, :, :1, :1]).all((1, 2, 3))  # mixed by mixup
    assert (y > 0).sum(1).max() == 2
    if "mixup" not in options:
        assert set((255 * x[0]).round().unique().tolist()) <= {0.0, float(count - 1)}
    elif "cutmix" not in options:
        assert constant.all()
    else:
        assert 0.3 < constant.float().mean() < 0.75  # also where cutmix's rectangle is empty
    if "cutmix" not in options:
        # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)).
        assert label_share.mean().item() == pytest.approx(0.5, abs=0.08)
        assert label_share.var().item() == pytest.approx(1 / (4 * 2.6), abs=0.03)


def test_mixed_targets_are_smoothed_and_some_images_are_not_mixed() -> None:
    images, labels = pictures(500), torch.arange(500) % 10
    mixing = {"mixup": 0.8, "mix_probability": 0.3}
    _, y = augmented(Augmentation(**mixing), images, labels)
    unmixed = y.gather(1, labels[:, None]).squeeze(1) == 1
    # Image k is mixed with image 499 - k, which has another label.
    assert unmixed.float().mean() == pytest.approx(0.7, abs=0.1)
    _, smooth = augmented(Augmentation(**mixing, smoothing=0.1), images, labels)
    torch.testing.assert_close(smooth, 0.9 * y + 0.1 / 10)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(LabError, match="policy must be one of rand, auto; got 'random'"):
        Augmentation(policy="random")
    with pytest.raises(LabError, match=r"erase must be from 0 to 1; got 1.5"):
        Augmentation(erase=1.5)
    with pytest.raises(LabError, match="crop must not be negative; got -1"):
        Augmentation(crop=-1)


class Launches(TorchDispatchMode):
    """Count the operations that allocate or change memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = func.is_view or "empty" in str(func) or "_local_scalar_dense" in str(func)
        self.count += not views
        return func(*args, **(kwargs or {}))


def test_augmentation_launches_few_kernels() -> None:
    images, labels = pictures(8), torch.arange(8)
    augmented(EVERYTHING, images, labels)
    counted = {}
    for policy in ("rand", "auto"):
        whole = Augmentation(**{**EVERYTHING.__dict__, "policy": policy})
        with Launches() as launches:
            augmented(whole, images, labels)
        counted[policy] = launches.count
    assert max(counted.values()) < 250, counted


@pytest.mark.gpu
def test_augmentation_never_waits_for_the_device() -> None:
    images, labels = pictures(128).cuda(), torch.arange(128, device="cuda") % 10
    mean, std = MEAN.cuda(), STD.cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    for policy in ("rand", "auto"):
        whole = Augmentation(**{**EVERYTHING.__dict__, "policy": policy})
        whole(images, labels, generator, mean, std, 10)  # caches the tables on the device
        with no_host_sync():
            whole(images, labels, generator, mean, std, 10)
