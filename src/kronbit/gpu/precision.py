"""Precision of the products of an ordinary step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Precision of the products of a step.

    Attributes:
        precise: True if roots and gradients, and X and Y in the scratch, are sums of two bf16
            numbers, not float16, and Ĝ is held in float32, not bf16.
        direct: True if gradients with wide rows are multiplied in place, without a copy.
    """

    precise: bool
    direct: bool = False

    @property
    def parts(self) -> int:
        """Number of 16-bit numbers in an element of a root, of X and of Y."""
        return 2 if self.precise else 1

    @property
    def held(self) -> torch.dtype:
        """Dtype in which Ĝ is held."""
        return torch.float32 if self.precise else torch.bfloat16
