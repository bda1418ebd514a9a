"""VGG-19 with batch normalisation, for small images."""

from __future__ import annotations

from torch import Tensor, nn

# (width, convolutions) of the five stages; each stage halves the side at its end
STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


class VGG19(nn.Module):
    """Sixteen convolutions, the mean over the image, and one linear layer.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inner = 3
        for width, count in STAGES:
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
