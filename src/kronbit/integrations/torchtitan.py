"""torchtitan's optimizer container, extended by kronbit's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import kronbit
from kronbit.base import IMPLEMENTATION
from kronbit.config import GROUP_OPTIONS


class KronbitOptimizers(OptimizersContainer):  # type: ignore[misc, type-arg, unused-ignore]
    """Accepts ``optimizer_name="Shampoo"`` and ``"CASPR"`` in addition to torchtitan's names.

    ``optimizer_kwargs`` of a param group takes options that may differ by group, of kronbit and of
    the base. Options of the whole optimizer (``base``, ``workspace_mb``, ``blocks``, ...) belong in
    ``optimizer_factory_kwargs_by_name``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's config, which builds this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        known: dict[str, Callable[..., Optimizer]]
        known = {"Shampoo": kronbit.Shampoo, "CASPR": kronbit.CASPR}
        return known.get(name) or OptimizersContainer._resolve_optimizer_factory(name)

    def _register_bf16_optimizer_state_hook(self) -> None:
        raise ValueError(
            "implementation='fused_opt_states_bf16' supports torch's Adam and AdamW only: use "
            "'fused', or base='adamw8bit' in optimizer_factory_kwargs_by_name"
        )


def shampoo4bit(
    lr: float = 8e-4, left_to_base: str | None = None, **options: Any
) -> KronbitOptimizers.Config:
    """Return a config that replaces torchtitan's ``default_adamw``.

    Args:
        lr: Learning rate of the base.
        left_to_base: Regular expression for names of parameters that are not preconditioned, such
            as ``"tok_embeddings|output"``.
        **options: Options of ``kronbit.Shampoo`` and of its base, by default AdamW with
            torchtitan's defaults. Building the optimizer raises an error for an unknown option.
    """
    defaults = {} if "base" in options else {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    given = {"lr": lr, **defaults, **options}
    # Options that the container writes into groups. They override those of the whole optimizer.
    of_groups = {*GROUP_OPTIONS, *IMPLEMENTATION, "lr"}
    whole = {name: given.pop(name) for name in list(given) if name not in of_groups}
    kept = {**given, "precondition": False}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="Shampoo", optimizer_kwargs=keywords)
        for pattern, keywords in ((left_to_base, kept), (".*", given))
        if pattern is not None
    ]
    return KronbitOptimizers.Config(
        param_groups=groups, optimizer_factory_kwargs_by_name={"Shampoo": whole}
    )
