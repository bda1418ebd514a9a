"""Convolutional networks: ResNet-34 and ResNet-50, VGG-19, and a small one for digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from kronbit.lab.errors import LabError

RESNET_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # (width, blocks)
# (width, convolutions) of VGG-19's stages; each stage halves the side at its end
VGG_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def convolution(inner: int, outer: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution, padded to keep the side if the stride is 1, and its batch norm."""
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(outer)]


# Convolutions of a block's branch as (width, kernel, stride), given the stage's width and a stride.
Branch: TypeAlias = list[tuple[int, int, int]]


def basic(width: int, stride: int) -> Branch:
    """Return two 3 x 3 convolutions."""
    return [(width, 3, stride), (width, 3, 1)]


def bottleneck(width: int, stride: int) -> Branch:
    """Return convolutions of 1 x 1, 3 x 3 (with the stride) and 1 x 1 (four times as wide)."""
    return [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the branch is 0 at initialisation."""

    def __init__(self, inner: int, branch: Branch, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = inner
        for outer, kernel, step in branch:
            layers += [*convolution(width, outer, kernel, step), nn.ReLU(inplace=True)]
            width = outer
        self.branch = nn.Sequential(*layers[:-1])
        nn.init.zeros_(self.branch[-1].weight)  # type: ignore[arg-type]
        same = stride == 1 and inner == width
        self.shortcut = nn.Sequential(*([] if same else convolution(inner, width, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, inner, h, w) to (b, outer, h / stride, w / stride)."""
        y: Tensor = self.branch(x)
        return y.add_(self.shortcut(x)).relu_()


class ResNet(nn.Module):
    """Four stages of blocks.

    Args:
        branch: ``basic`` for ResNet-34, ``bottleneck`` for ResNet-50.
        classes: Number of classes.
        stem: ``cifar`` keeps the side of the image, ``imagenet`` divides it by four.
    """

    def __init__(
        self, branch: Callable[[int, int], Branch], classes: int = 100, stem: str = "cifar"
    ) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise LabError(f"stem must be cifar or imagenet; got {stem!r}")
        large = stem == "imagenet"
        first = convolution(3, 64, 7, 2) if large else convolution(3, 64, 3)
        pool = [nn.MaxPool2d(3, 2, 1)] if large else []
        self.stem = nn.Sequential(*first, nn.ReLU(inplace=True), *pool)
        blocks: list[nn.Module] = []
        inner = 64
        for width, count in RESNET_STAGES:
            for place in range(count):
                stride = 2 if place == 0 and width > 64 else 1
                layers = branch(width, stride)
                blocks.append(Residual(inner, layers, stride))
                inner = layers[-1][0]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, 3, h, w)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class VGG19(nn.Module):
    """VGG-19 with batch normalisation, for small images.

    It has sixteen convolutions, the mean over the image, and one linear layer.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inner = 3
        for width, count in VGG_STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width)]
                layers += [nn.ReLU(inplace=True)]
                inner = width
            layers += [nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inner, classes)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, 3, h, w) whose sides are at least 32."""
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


class DigitsCNN(nn.Sequential):
    """Three convolutions and two linear layers for images of 1 x 8 x 8.

    Args:
        classes: Number of classes.
        width: Width of the first convolution; the others are twice as wide.
    """

    def __init__(self, classes: int = 10, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 4 * width),
            nn.ReLU(inplace=True),
            nn.Linear(4 * width, classes),
        )
