"""What all optimizers have in common that are wrapped around another one."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Around(Optimizer):
    """An optimizer around a first-order one, F, which takes the step.

    Attributes:
        base: F; ``param_groups`` is F's own list.
    """

    base: Optimizer

    # The attribute of torch's optimizers, here F's: schedulers, scalers and trainers may read it,
    # write to it and replace it on either of the two.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """F's own list of param groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    def train(self) -> None:
        """Pass through to a schedule-free F; nothing to do for others."""
        if hasattr(self.base, "train"):
            self.base.train()

    def eval(self) -> None:
        """Pass through to a schedule-free F; nothing to do for others."""
        if hasattr(self.base, "eval"):
            self.base.eval()
