"""A held-out part of the training set, to choose settings without the test set."""

from __future__ import annotations

import torch
from torch import Tensor

from kronbit.lab.errors import LabError


def divide(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Divide a training set. The result does not depend on the recipe's seed.

    Args:
        labels: Class of each example.
        share: Share of each class that is held out, rounded.

    Returns:
        Indices of training examples and of held-out examples, both in ascending order.

    Raises:
        LabError: If one of the two parts is empty.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        examples = order[labels[order] == label]
        held[examples[: round(share * len(examples))]] = True
    if held.all() or not held.any():
        raise LabError(
            f"holdout={share} leaves {int((~held).sum())} of {len(labels)} examples for training: "
            "--set holdout=..."
        )
    return (~held).nonzero().flatten(), held.nonzero().flatten()
