"""Optimizers that are made of a model: factories for the Trainer of transformers.

``Trainer(optimizer_cls_and_kwargs=(Shampoo, {...}))`` needs nothing of this. A factory sees the
model, so that parameters have names, kinds of modules can be left out, and K-FAC finds its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

import kronbit
from kronbit.integrations.strings import read_options
from kronbit.optimizer import SecondOrder

# Of LoRA's factors: smaller blocks learn as well, and there are not too many of them yet.
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
        optim_args: str | Mapping[str, Any] | None = None,
        device_mesh: object = None,
        **options: Any,
    ) -> SecondOrder:
        """Make the optimizer of a model's trainable parameters.

        Two options are of groups. ``skip`` is what is left to the base optimizer, as for
        ``kronbit.param_groups``. ``weight_decay`` is that of matrices; biases and the parameters of
        norms, which have fewer than two axes, get none.

        Args:
            model: The model.
            optim_args: More options, as text (``TrainingArguments.optim_args``).
            device_mesh: What axolotl hands on; not needed, since sharded parameters know theirs.
            **options: Of the optimizer and of its base, such as ``lr``; ``Trainer`` does not hand
                its ``learning_rate`` and its ``weight_decay`` on.

        Raises:
            ValueError: If an option is given twice.
        """
        options, more = read_options(options), read_options(optim_args or {})
        twice = sorted(more.keys() & options.keys())
        if twice:
            raise ValueError(f"option {twice[0]!r} is given twice, once of it in optim_args")
        options |= more
        skip, weight_decay = options.pop("skip", ()), options.pop("weight_decay", 0.0)
        # Layers of K-FAC are not cut, and an order that is given is that of all.
        uncut = issubclass(self.optimizer, kronbit.KFAC) or "max_order" in options
        order = None if uncut else LOW_RANK_ORDER
        groups = []
        for group in kronbit.param_groups(model, skip, order):
            named = [(name, p) for name, p in group["params"] if p.requires_grad]
            for decays in (True, False):
                own = [(name, p) for name, p in named if (p.ndim >= 2) == decays]
                if own:
                    decay = weight_decay if decays else 0.0
                    groups.append({**group, "params": own, "weight_decay": decay})
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
