"""timm's registry: ``import kronbit.integrations.timm``, and then ``opt="shampoo4bit"``.

``timm.optim.create_optimizer_v2`` and its training script know ``shampoo4bit`` and ``caspr4bit``
from then on. Param groups with timm's flag ``use_fallback`` are left to the base optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

import kronbit


def _with_fallback(params: Any) -> Any:
    """Groups of timm for an optimizer of matrices say who is not one."""
    if not isinstance(params, Iterable):
        return params
    groups = list(params)
    for group in groups:
        if isinstance(group, dict) and group.get("use_fallback"):
            group.setdefault("precondition", False)
    return groups


class Shampoo4bit(kronbit.Shampoo):
    """``kronbit.Shampoo`` of timm's param groups; AdamW underneath unless ``base`` is given."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(_with_fallback(params), **options)


class CASPR4bit(kronbit.CASPR):
    """``kronbit.CASPR`` of timm's param groups; AdamW underneath unless ``base`` is given."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(_with_fallback(params), **options)


for _kind in (Shampoo4bit, CASPR4bit):
    default_registry.register(
        OptimInfo(
            name=_kind.__name__.lower(),
            opt_class=_kind,
            description="around AdamW, with a second-order state of 4 bits (kronbit)",
            has_betas=True,
        )
    )
