"""EVA and M-FAC with defaults for tests: SGD as the base, and three gradients."""

from __future__ import annotations

from typing import Any

from support.layers import sgd
from torch import nn
from torch.optim import Optimizer

from kronbit.baselines import EVA, MFAC


def eva(model: nn.Module, base: Optimizer | None = None, **options: Any) -> EVA:
    return EVA(base or sgd(model), model=model, **options)


def mfac(model: nn.Module, base: Optimizer | None = None, **options: Any) -> MFAC:
    return MFAC(base or sgd(model), **{"gradients": 3, **options})
