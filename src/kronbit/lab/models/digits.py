"""A small network for scikit-learn's digits."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (b, 1, 8, 8)."""
        logits: Tensor = self.layers(x)
        return logits
