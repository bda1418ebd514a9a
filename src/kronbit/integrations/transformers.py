"""Factories for the Trainer of transformers, which build an optimizer from a model.

``Trainer(optimizer_cls_and_kwargs=(Shampoo, {...}))`` works without them. A factory gets the model,
so that parameters have names, kinds of modules can be skipped, and K-FAC can watch the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

import kronbit
from kronbit.integrations.strings import read_options
from kronbit.optimizer import SecondOrder

# max_order of LoRA's matrices, so that blocks are not much larger than LoRA's rank.
LOW_RANK_ORDER = 128


class ShampooFactory:
    """Builds ``kronbit.Shampoo``; ``Trainer`` calls ``ShampooFactory()(model, **options)``.

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
        """Build the optimizer for a model's trainable parameters.

        Args:
            model: The model.
            skip: Parameters left to the base optimizer, as for ``kronbit.param_groups``.
            weight_decay: Weight decay of parameters with two or more axes; biases and the
                parameters of norms get none.
            optim_args: Further options as text (``TrainingArguments.optim_args``).
            device_mesh: Ignored; axolotl passes it, but sharded parameters know their mesh.
            **options: Options of the optimizer and of its base, such as ``lr``. ``Trainer`` does
                not pass on its ``learning_rate`` and ``weight_decay``.

        Raises:
            ValueError: If an option is given twice.
        """
        explicit = {"skip": skip, "weight_decay": weight_decay}
        options |= {name: value for name, value in explicit.items() if value is not None}
        options, more = read_options(options), read_options(optim_args or {})
        twice = sorted(more.keys() & options.keys())
        if twice:
            raise ValueError(f"option {twice[0]!r} is given twice, once in optim_args")
        options |= more
        skipped, decay = options.pop("skip", None) or (), options.pop("weight_decay", None) or 0.0
        watches = issubclass(self.optimizer, kronbit.KFAC)
        # K-FAC keeps layers whole, and a given max_order applies to all parameters.
        order = None if watches or "max_order" in options else LOW_RANK_ORDER
        groups = []
        for group in kronbit.param_groups(model, skipped, order):
            named = [(name, p) for name, p in group["params"] if p.requires_grad]
            for decays in (True, False):
                params = [(name, p) for name, p in named if (p.ndim >= 2) == decays]
                if params:
                    part = {"params": params, "weight_decay": decay if decays else 0.0}
                    groups.append({**group, **part})
        if watches:
            options["model"] = model
        return self.optimizer(groups, **options)


class CASPRFactory(ShampooFactory):
    """Like ``ShampooFactory``, for ``kronbit.CASPR``."""

    optimizer = kronbit.CASPR


class KFACFactory(ShampooFactory):
    """Like ``ShampooFactory``, for ``kronbit.KFAC``, which watches the layers of the model."""

    optimizer = kronbit.KFAC


class AdaBKFactory(KFACFactory):
    """Like ``KFACFactory``, for ``kronbit.AdaBK``."""

    optimizer = kronbit.AdaBK
