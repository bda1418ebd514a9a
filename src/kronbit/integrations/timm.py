"""Entries in timm's registry of optimizers: ``opt="shampoo4bit"`` and ``opt="caspr4bit"``.

Importing this module registers both names for ``timm.optim.create_optimizer_v2`` and timm's
training script. Param groups with timm's flag ``use_fallback`` are left to the base optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

import kronbit
from kronbit.optimizer import SecondOrder


class _ForTimm(SecondOrder):
    """Sets ``precondition=False`` on groups with timm's flag ``use_fallback``."""

    def __init__(self, params: Any, **options: Any) -> None:
        if isinstance(params, Iterable):
            params = list(params)
            for group in params:
                if isinstance(group, dict) and group.get("use_fallback"):
                    group.setdefault("precondition", False)
        super().__init__(params, **options)


class Shampoo4bit(_ForTimm, kronbit.Shampoo):
    """``kronbit.Shampoo`` for timm's param groups, by default around AdamW."""


class CASPR4bit(_ForTimm, kronbit.CASPR):
    """``kronbit.CASPR`` for timm's param groups, by default around AdamW."""


for _kind in (Shampoo4bit, CASPR4bit):
    default_registry.register(
        OptimInfo(
            name=_kind.__name__.lower(),
            opt_class=_kind,
            description="around AdamW, with a second-order state of 4 bits (kronbit)",
            has_betas=True,
        )
    )
