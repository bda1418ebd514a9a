"""The outline of a state dict: it is checked before the state in it is looked at."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from kronbit.config import GROUP_OPTIONS

# What may not be taken for another; of anything else, anything may.
_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "sequence": (list, tuple),
    "text": (str,),
}


def copied(state_dict: Any) -> dict[str, Any]:
    """A copy of the outermost dict, which hooks may change.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"a state dict is a dict; got {type(state_dict).__name__}")
    return dict(state_dict)


def check(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], prefix: str = ""
) -> None:
    """Refuse what does not fit param groups.

    Args:
        state_dict: What is to be loaded.
        groups: The optimizer's.
        prefix: The place of the state dict, for messages.

    Raises:
        ValueError: If it does not fit; by key.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"{prefix}{key} is missing: this is not a state dict of an optimizer")
    state, saved = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        raise ValueError(f"{prefix}state is {type(state).__name__}; expected a dict")
    if not isinstance(saved, (list, tuple)):
        raise ValueError(f"{prefix}param_groups is {type(saved).__name__}; expected a list")
    if len(saved) != len(groups):
        raise ValueError(
            f"{prefix}param_groups: the checkpoint has {len(saved)} param groups, the optimizer "
            f"has {len(groups)}"
        )
    for index, (old, group) in enumerate(zip(saved, groups, strict=True)):
        _check_group(old, group, f"{prefix}param_groups[{index}]")
    keys = {key for old in saved for key in old["params"]}
    for key in state.keys() - keys:
        raise ValueError(
            f"{prefix}state[{key!r}] belongs to no parameter of the checkpoint's param_groups"
        )
    for key, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"{prefix}state[{key!r}] is {type(entry).__name__}; expected a dict")


def _check_group(old: Any, group: Mapping[str, Any], where: str) -> None:
    if not isinstance(old, Mapping):
        raise ValueError(f"{where} is {type(old).__name__}; expected a dict")
    if "params" not in old:
        raise ValueError(f"{where}['params'] is missing")
    keys = old["params"]
    if not isinstance(keys, (list, tuple)) or not all(isinstance(key, Hashable) for key in keys):
        raise ValueError(f"{where}['params'] must be a list of numbers or names; got {keys!r}")
    names = old.get("param_names", keys)
    if not isinstance(names, (list, tuple)) or len(names) != len(keys):
        raise ValueError(f"{where}['param_names'] must be as many names; got {names!r}")
    if len(keys) != len(group["params"]):
        raise ValueError(
            f"{where} has {len(keys)} parameters in the checkpoint and {len(group['params'])} in "
            "the optimizer"
        )
    # Ours are looked at where they are read.
    for name in (old.keys() & group.keys()) - {"params", "param_names", *GROUP_OPTIONS}:
        _check_option(f"{where}[{name!r}]", old[name], group[name])
    if "lr" in old and isinstance(plain(group.get("lr")), (int, float)):
        lr = plain(old["lr"])
        if not isinstance(lr, (int, float)) or not math.isfinite(lr):
            raise ValueError(f"{where}['lr'] must be a finite number; got {old['lr']!r}")


def _check_option(where: str, value: Any, own: Any) -> None:
    kind, expected = _kind(value), _kind(own)
    if kind and expected and kind != expected:
        raise ValueError(f"{where} must be a {expected}, as {own!r} is; got {value!r}")
    if kind == expected == "sequence" and len(value) != len(own):
        raise ValueError(f"{where} must have the length of {own!r}; got {value!r}")
    for number in map(plain, value if kind == "sequence" else [value]):
        if isinstance(number, float) and math.isnan(number):
            raise ValueError(f"{where} must be a number; got {value!r}")


def _kind(value: Any) -> str | None:
    found = plain(value)
    return next((kind for kind, types in _KINDS.items() if isinstance(found, types)), None)


def plain(value: Any) -> Any:
    """The number in a tensor of one element, or of another package; anything else as it is."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    other = isinstance(value, Real) and not isinstance(value, (int, float))
    return float(value) if other else value
