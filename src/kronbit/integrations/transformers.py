"""Optimizers that are made of a model: factories for the Trainer of transformers.

``Trainer(optimizer_cls_and_kwargs=(Shampoo, {...}))`` needs nothing of this. A factory sees the
model, so that parameters have names, kinds of modules can be left out, and K-FAC finds its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

import kronbit
from kronbit.integrations.strings import read_options
from kronbit.optimizer import SecondOrder

# Of LoRA's factors: blocks that are not far larger than they are.
LOW_RANK_ORDER = 128


class ShampooFactory:
    """What ``Trainer`` calls with the model: ``ShampooFactory()(model, **options)``.

    Example::

        options = {"lr": 1e-3, "skip": "lm_head.*"}
        # Trainer(..., optimizer_cls_and_kwargs=(ShampooFactory, options)) does this:
        opt = ShampooFactory()(model, **options)
    """

    optimizer: ClassVar[type[SecondOrder]] = kronbit.Shampoo

    def __call__(
        self,
        model: nn.Module,
        *,
        skip: str | type[nn.Module] | Iterable[str | type[nn.Module]] | None = None,
        weight_decay: float | None = None,
        optim_args: str | Mapping[str, Any] | None = None,
        device_mesh: object = None,
        **options: Any,
    ) -> SecondOrder:
        """Make the optimizer of a model's trainable parameters.

        Args:
            model: The model.
            skip: What is left to the base optimizer, as for ``kronbit.param_groups``.
            weight_decay: Of matrices; biases and the parameters of norms, which have fewer than two
                axes, get none.
            optim_args: More options, as text (``TrainingArguments.optim_args``).
            device_mesh: What axolotl hands on; not needed, since sharded parameters know theirs.
            **options: Of the optimizer and of its base, such as ``lr``; ``Trainer`` does not hand
                its ``learning_rate`` and its ``weight_decay`` on.

        Raises:
            ValueError: If an option is given twice.
        """
        explicit = {"skip": skip, "weight_decay": weight_decay}
        options |= {name: value for name, value in explicit.items() if value is not None}
        options, more = read_options(options), read_options(optim_args or {})
        twice = sorted(more.keys() & options.keys())
        if twice:
            raise ValueError(f"option {twice[0]!r} is given twice, once of it in optim_args")
        options |= more
        skipped, decay = options.pop("skip", None) or (), options.pop("weight_decay", None) or 0.0
        # Layers of K-FAC are not cut, and an order that is given is that of all.
        uncut = issubclass(self.optimizer, kronbit.KFAC) or "max_order" in options
        order = None if uncut else LOW_RANK_ORDER
        groups = []
        for group in kronbit.param_groups(model, skipped, order):
            named = [(name, p) for name, p in group["params"] if p.requires_grad]
            for decays in (True, False):
                params = [(name, p) for name, p in named if (p.ndim >= 2) == decays]
                if params:
                    part = {"params": params, "weight_decay": decay if decays else 0.0}
                    groups.append({**group, **part})
        return self._make(groups, model, options)

    def _make(
        self, groups: list[dict[str, Any]], model: nn.Module, options: dict[str, Any]
    ) -> SecondOrder:
        return self.optimizer(groups, **options)


class CASPRFactory(ShampooFactory):
    """As ``ShampooFactory``, for ``kronbit.CASPR``."""

    optimizer = kronbit.CASPR


class KFACFactory(ShampooFactory):
    """As ``ShampooFactory``, for ``kronbit.KFAC``, which watches the layers of the model."""

    optimizer: ClassVar[type[kronbit.KFAC]] = kronbit.KFAC

    def _make(
        self, groups: list[dict[str, Any]], model: nn.Module, options: dict[str, Any]
    ) -> SecondOrder:
        return self.optimizer(groups, model=model, **options)


class AdaBKFactory(KFACFactory):
    """As ``KFACFactory``, for ``kronbit.AdaBK``."""

    optimizer = kronbit.AdaBK
