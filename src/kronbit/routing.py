"""Which parameters of a model are preconditioned: param groups by name and by kind of module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from kronbit.base import tensors_of
from kronbit.config import Config
from kronbit.distributed.sharding import refuse
from kronbit.messages import parameter_name
from kronbit.statistics.base import Statistics

# How peft, torchtune and kohya's scripts call the factors of a low-rank update.
_LOW_RANK = re.compile(r"(^|\.)lora_")


def param_groups(
    model: nn.Module,
    skip: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
    low_rank_order: int | None = None,
) -> list[dict[str, Any]]:
    """The named parameters of a model in groups; those to be skipped with ``precondition=False``.

    A weight that several modules share is skipped if one of them is: with ``nn.Embedding``, a head
    that is tied to it goes, too.

    Example::

        opt = Shampoo(kronbit.param_groups(model, skip=(nn.Embedding, "lm_head.*")), lr=1e-3)

    Args:
        model: The model.
        skip: Patterns of parameter names (``*`` and ``?`` stand for anything), and kinds of modules
            all of whose parameters are left to the base optimizer.
        low_rank_order: ``max_order`` of LoRA's factors, ``r x n`` and ``m x r``, which are a group
            of their own then: a block of order n is far larger than they are. ``None``: that of all
            others. (K-FAC and AdaBK cut nothing.)

    Returns:
        Up to three groups. Options may be added to them.

    Raises:
        TypeError: If something in ``skip`` is neither a pattern nor a kind of module.
        ValueError: If something in ``skip`` is not found in the model.
    """
    skipped: set[Tensor] = set()
    for what in [skip] if isinstance(skip, (str, type)) else skip:
        found = set(_matching(model, what))
        if not found:
            names = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            label = repr(what) if isinstance(what, str) else what.__name__
            raise ValueError(
                f"skip: {label} matches no parameter of the model; its names are like {names}"
            )
        skipped |= found
    plain, low_rank, left_out = [], [], []
    for name, p in model.named_parameters():
        if p in skipped:
            left_out.append((name, p))
        elif low_rank_order is not None and _LOW_RANK.search(name):
            low_rank.append((name, p))
        else:
            plain.append((name, p))
    groups: list[dict[str, Any]] = [
        {"params": plain},
        {"params": low_rank, "max_order": low_rank_order},
        {"params": left_out, "precondition": False},
    ]
    return [group for group in groups if group["params"]]


def _matching(model: nn.Module, what: str | type[nn.Module]) -> Iterable[Tensor]:
    """The parameters that a pattern or a kind of module stands for."""
    if isinstance(what, str):
        # A shared weight has several names.
        every = model.named_parameters(remove_duplicate=False)
        return (p for name, p in every if fnmatchcase(name, what))
    if isinstance(what, type) and issubclass(what, nn.Module):
        kinds = (module for module in model.modules() if isinstance(module, what))
        return (p for module in kinds for p in module.parameters())
    raise TypeError(f"skip takes patterns of names and kinds of modules; got {what!r}")


def check_group(
    group: Mapping[str, Any],
    earlier: Sequence[Mapping[str, Any]],
    config: Config,
    statistics: Statistics,
) -> None:
    """Refuse bad options, and options that do not suit the group's parameters.

    Args:
        group: The group, of which options may be missing.
        earlier: Those before it.
        config: The optimizer's own options.
        statistics: They know how a parameter is cut.

    Raises:
        TypeError: If it is not a dict.
        ValueError: If an option or a parameter is refused; by name.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"a param group must be a dict; got {type(group).__name__}")
    own = config.for_group(group)
    known = [p for g in earlier if config.for_group(g).precondition for p in g["params"]]
    for number, p in enumerate(tensors_of(group)):
        if isinstance(p, Tensor):
            if own.precondition:
                name = parameter_name(group, len(earlier), number)
                refuse(name, p, statistics.takes_shards, known)
                known.append(p)
            statistics.route(p, own)
