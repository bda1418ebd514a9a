"""A part of the training set that is held out, to choose settings without the test set."""

from __future__ import annotations

import torch
from torch import Tensor

from kronbit.lab.errors import LabError


def divide(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Divide a training set; the result does not depend on a recipe's seed.

    Args:
        labels: Class of each example.
        share: Share of each class that is held out, rounded.

    Returns:
        Indices of examples to train on, and of those held out, both in ascending order.

    Raises:
        LabError: If nothing is left on one of the two sides.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for number in labels.unique():
        members = order[labels[order] == number]
        held[members[: round(share * len(members))]] = True
    if held.all() or not held.any():
        raise LabError(
            f"holdout={share} leaves {int((~held).sum())} of {len(labels)} examples for training: "
            "--set holdout=..."
        )
    return (~held).nonzero().flatten(), held.nonzero().flatten()
