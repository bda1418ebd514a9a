"""ResNet-34 and ResNet-50."""

from __future__ import annotations

from torch import Tensor, nn

from kronbit.lab.errors import LabError

WIDTHS, COUNTS = (64, 128, 256, 512), (3, 4, 6, 3)  # of the stages of both networks


def convolution(inner: int, outer: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution, padded to keep the side if the stride is 1, and its batch norm."""
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(outer)]


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the branch is 0 at initialisation."""

    def __init__(self, branch: list[nn.Module], inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        nn.init.zeros_(self.branch[-1].weight)  # type: ignore[arg-type]
        same = stride == 1 and inner == outer
        self.shortcut = nn.Sequential(*([] if same else convolution(inner, outer, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, inner, h, w) to (b, outer, h / stride, w / stride)."""
        y: Tensor = self.branch(x)
        return y.add_(self.shortcut(x)).relu_()


class BasicBlock(Residual):
    """A residual block of two 3 x 3 convolutions."""

    expansion = 1

    def __init__(self, inner: int, width: int, stride: int) -> None:
        branch = [
            *convolution(inner, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3),
        ]
        super().__init__(branch, inner, width, stride)


class Bottleneck(Residual):
    """A residual block of 1 x 1, 3 x 3 (with the stride) and 1 x 1 (four times as wide)."""

    expansion = 4

    def __init__(self, inner: int, width: int, stride: int) -> None:
        branch = [
            *convolution(inner, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        ]
        super().__init__(branch, inner, 4 * width, stride)


class ResNet(nn.Module):
    """Four stages of blocks.

    Args:
        block: ``BasicBlock`` for ResNet-34, ``Bottleneck`` for ResNet-50.
        classes: Number of classes.
        stem: ``cifar`` keeps the side of the image, ``imagenet`` divides it by four.
    """

    def __init__(
        self, block: type[BasicBlock | Bottleneck], classes: int = 100, stem: str = "cifar"
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
        for width, count in zip(WIDTHS, COUNTS, strict=True):
            for place in range(count):
                blocks.append(block(inner, width, 2 if place == 0 and width > 64 else 1))
                inner = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, 3, h, w)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits
