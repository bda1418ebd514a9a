"""torchtitan's container of optimizers, with kronbit's among those that it knows by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import kronbit
from kronbit.config import GROUP_OPTIONS
from kronbit.first_order import IMPLEMENTATION


class KronbitOptimizers(OptimizersContainer):  # type: ignore[misc, type-arg, unused-ignore]
    """Param groups may say ``optimizer_name="Shampoo"`` or ``"CASPR"``, beside torchtitan's own.

    Options of kronbit and of the base, in the group's ``optimizer_kwargs``, hold for that group.
    What holds for an optimizer as a whole (``base``, ``workspace_mb``, ``blocks``, ...) stands in
    ``optimizer_factory_kwargs_by_name``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]
        """As torchtitan's; it builds this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        known: dict[str, Callable[..., Optimizer]] = {
            "Shampoo": kronbit.Shampoo,
            "CASPR": kronbit.CASPR,
        }
        if name in known:
            return known[name]
        factory: Callable[..., Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
        return factory

    def _register_bf16_optimizer_state_hook(self) -> None:
        raise ValueError(
            "implementation='fused_opt_states_bf16' knows torch's own Adam and AdamW only: take "
            "'fused', or base='adamw8bit' in optimizer_factory_kwargs_by_name"
        )


def shampoo4bit(
    lr: float = 8e-4, left_to_base: str | None = None, **options: Any
) -> KronbitOptimizers.Config:
    """What stands in the place of torchtitan's ``default_adamw``.

    Args:
        lr: The base's learning rate.
        left_to_base: A regular expression for names of parameters that are not preconditioned,
            such as ``"tok_embeddings|output"``.
        **options: Of ``kronbit.Shampoo`` and of its base, which is AdamW with torchtitan's defaults
            unless ``base`` is given. One that neither of them knows is an error when it is built.
    """
    defaults = {} if "base" in options else {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    given = {"lr": lr, **defaults, **options}
    # The container writes these into groups, where they would hide what the whole is given.
    of_groups = {*GROUP_OPTIONS, *IMPLEMENTATION, "lr"}
    whole = {name: given.pop(name) for name in list(given) if name not in of_groups}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="Shampoo", optimizer_kwargs=given)]
    if left_to_base is not None:
        kept = {**given, "precondition": False}
        groups.insert(
            0,
            ParamGroupConfig(pattern=left_to_base, optimizer_name="Shampoo", optimizer_kwargs=kept),
        )
    return KronbitOptimizers.Config(
        param_groups=groups, optimizer_factory_kwargs_by_name={"Shampoo": whole}
    )
