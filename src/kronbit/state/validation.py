"""Checks of a state dict: its outline, the leaves of blocks, and F's state."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit.config import GROUP_OPTIONS
from kronbit.factors import Layout, Leaves

# An option must keep its kind. Values of other types are not compared.
_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "sequence": (list, tuple),
    "string": (str,),
}

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def check_outline(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], prefix: str = ""
) -> None:
    """Check that a state dict matches an optimizer's param groups.

    Raises:
        ValueError: If an entry does not match. The message names the key, with the prefix.
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
        raise ValueError(f"{where}['param_names'] must hold one name per parameter; got {names!r}")
    if len(keys) != len(group["params"]):
        raise ValueError(
            f"{where} has {len(keys)} parameters in the checkpoint and {len(group['params'])} in "
            "the optimizer"
        )
    # The second-order options are checked where they are read.
    for name in (old.keys() & group.keys()) - {"params", "param_names", *GROUP_OPTIONS}:
        _check_option(f"{where}[{name!r}]", old[name], group[name])
    if "lr" in old and isinstance(plain(group.get("lr")), (int, float)):
        lr = plain(old["lr"])
        if not isinstance(lr, (int, float)) or not math.isfinite(lr):
            raise ValueError(f"{where}['lr'] must be a finite number; got {old['lr']!r}")


def _check_option(where: str, value: Any, current: Any) -> None:
    kind, expected = _kind(value), _kind(current)
    if kind and expected and kind != expected:
        raise ValueError(f"{where} must be a {expected}, as {current!r} is; got {value!r}")
    if kind == expected == "sequence" and len(value) != len(current):
        raise ValueError(f"{where} must have the length of {current!r}; got {value!r}")
    for number in map(plain, value if kind == "sequence" else [value]):
        if isinstance(number, float) and math.isnan(number):
            raise ValueError(f"{where} must be a number; got {value!r}")


def _kind(value: Any) -> str | None:
    number = plain(value)
    return next((kind for kind, types in _KINDS.items() if isinstance(number, types)), None)


def checked_leaves(values: Any, layout: Layout, where: str) -> Leaves:
    """Return the tensors of one side of a block after checking them against a layout.

    Raises:
        ValueError: If a tensor is missing or unknown, has another dtype or shape, or holds
            impossible numbers. The message names the tensor.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is missing or not a dict")
    for name in values.keys() - layout.keys():
        raise ValueError(f"{where}[{name!r}] is unknown; expected {', '.join(layout)}")
    leaves: Leaves = {}
    for name, (shape, dtype) in layout.items():
        if name not in values:
            raise ValueError(f"{where}[{name!r}] is missing")
        value = values[name]
        if not isinstance(value, Tensor) or value.dtype != dtype:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{where}[{name!r}] is {kind}; expected a tensor of {dtype}")
        if tuple(value.shape) != shape:
            raise ValueError(f"{where}[{name!r}] has shape {tuple(value.shape)}; expected {shape}")
        if value.is_meta or value.layout != torch.strided:
            problem = "on the meta device" if value.is_meta else value.layout
            raise ValueError(f"{where}[{name!r}] is {problem}; expected a strided tensor with data")
        if not is_finite(value):
            raise ValueError(f"{where}[{name!r}] holds non-finite values")
        if name.endswith(("scales", "eigenvalues")) and bool((value < 0).any()):
            raise ValueError(f"{where}[{name!r}] holds negative values")
        leaves[name] = value
    return leaves


def is_finite(value: Tensor) -> bool:
    """True if a tensor holds neither NaN nor infinity. Waits for the device."""
    if value.dtype not in _FLOATS:
        return True
    largest = torch.linalg.vector_norm(value.flatten(), ord=torch.inf) if value.numel() else 0.0
    return bool(largest < torch.inf)


def check_base_state(
    state: Mapping[str, Any], expected: Mapping[str, Any], base: type[Optimizer], where: str
) -> None:
    """Check that F can continue from a loaded state. Numbers in tensors are not checked.

    Args:
        state: F's state of one parameter.
        expected: F's state after a step on the meta device; empty if unknown.
        base: The class of F.
        where: Path of ``state`` in error messages.

    Raises:
        ValueError: If a value is missing, has another shape or has no data. The message names the
            value.
    """
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{where}[{str(name)!r}] is on the meta device and has no data")
    for name, tensor in expected.items() if state else ():
        if name not in state:
            raise ValueError(
                f"{where}[{name!r}] is missing: {base.__name__} needs it; was the checkpoint "
                "written with another base?"
            )
        if isinstance(tensor, Tensor):
            _check_like(f"{where}[{name!r}]", name, state[name], tensor)


def _check_like(where: str, name: str, value: Any, expected: Tensor) -> None:
    if not isinstance(value, Tensor):
        # Counters may be plain numbers. SGD accepts None for a momentum that has not begun.
        counter = not expected.dim() and isinstance(plain(value), (int, float))
        if not counter and (name, value) != ("momentum_buffer", None):
            raise ValueError(f"{where} is {type(value).__name__}; expected a tensor")
    elif value.shape != expected.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)}; expected {tuple(expected.shape)}"
        )


def plain(value: Any) -> Any:
    """Convert a tensor of one element, or a number of another library, to a Python number.

    Other values are returned unchanged.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    foreign = isinstance(value, Real) and not isinstance(value, (int, float))
    return float(value) if foreign else value
