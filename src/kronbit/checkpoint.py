"""Loading a state dict: checked before anything changes, converted where the format differs.

The base class's ``load_state_dict`` casts every tensor to the parameter's dtype: packed codes would
become floats, and float32 scales under bf16 parameters would be rounded. So loading is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kronbit.config import FORMAT, FORMAT_KEY, STRUCTURAL_OPTIONS, Config, Format
from kronbit.factors import Leaves, is_root, make_method
from kronbit.plan import Plan
from kronbit.precision import full_precision


@dataclass(frozen=True)
class Entry:
    """What a checkpoint says of one parameter.

    Attributes:
        key: Its key in the checkpoint.
        step: Steps that it has seen.
        base: F's own state.
        blocks: Key -> state of each block.
        config: The options it was written with.
    """

    key: Any
    step: int
    base: Mapping[str, Any]
    blocks: Mapping[str, Any]
    config: Config

    def path(self, *keys: str) -> str:
        """The place of something in this entry, for messages."""
        return f"state[{self.key!r}]" + "".join(f"[{key!r}]" for key in keys)


def check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of other param groups, of F alone, or of a later format."""
    if len(saved) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved)} param groups, the optimizer has {len(groups)}"
        )
    for index, (old, group) in enumerate(zip(saved, groups, strict=True)):
        if len(old["params"]) != len(group["params"]):
            raise ValueError(
                f"param_groups[{index}] has {len(old['params'])} parameters in the checkpoint and "
                f"{len(group['params'])} in the optimizer"
            )
        version = old.get(FORMAT_KEY)
        if version is None:
            raise ValueError(
                f"param_groups[{index}] has no {FORMAT_KEY!r}: this is not a kronbit checkpoint. "
                "A checkpoint of the base optimizer alone goes to optimizer.base.load_state_dict"
            )
        if version not in range(1, FORMAT + 1):
            raise ValueError(
                f"param_groups[{index}] has {FORMAT_KEY}={version!r}; this version of kronbit "
                f"reads formats 1 to {FORMAT}: upgrade kronbit"
            )


def merge_group(
    saved: Mapping[str, Any], group: Mapping[str, Any], config: Config
) -> dict[str, Any]:
    """A loaded param group: the checkpoint's numbers, but the optimizer's own way of storing."""
    own = {name: getattr(config, name) for name in STRUCTURAL_OPTIONS}
    rest = {name: value for name, value in group.items() if name != "params"}
    return {**rest, **saved, **own, FORMAT_KEY: FORMAT}


def read_entries(
    state: Mapping[Any, Any],
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[Tensor, Entry]:
    """Match the checkpoint's entries with the parameters, in order, and check their outline."""
    entries = {}
    for old, group in zip(saved, groups, strict=True):
        config = Config().for_group(old)
        for key, p in zip(old["params"], group["params"], strict=True):
            # reading optimizer.state[p] of a parameter without state leaves an empty entry
            if key in state and state[key] != {}:
                entries[p] = _read_entry(key, state[key], config)
    return entries


def _read_entry(key: Any, value: Any, config: Config) -> Entry:
    label = f"state[{key!r}]"
    if not isinstance(value, Mapping):
        raise ValueError(f"{label} is {type(value).__name__}; expected a dict")
    for name in ("step", "base"):
        if name not in value:
            raise ValueError(f"{label}[{name!r}] is missing")
    step = value["step"]
    step = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(step, bool) or not isinstance(step, (int, float)) or step < 0 or step % 1:
        raise ValueError(f"{label}['step'] must be a whole number >= 0; got {step!r}")
    if not isinstance(value["base"], Mapping):
        raise ValueError(f"{label}['base'] is {type(value['base']).__name__}; expected a dict")
    blocks = {name: block for name, block in value.items() if name not in ("step", "base")}
    return Entry(key, int(step), value["base"], blocks, config)


def check_base(entry: Entry, p: Tensor, known: Mapping[str, Any]) -> None:
    """Refuse F's tensors of a wrong shape, as far as it can be told.

    Args:
        entry: The parameter's entry.
        p: The parameter.
        known: F's present state of the parameter. Where there is none, the elementwise moments of
            common optimizers must have the parameter's shape.
    """
    for name, value in entry.base.items():
        if not isinstance(value, Tensor):
            continue
        expected = p.shape if name in _MOMENTS else value.shape
        if isinstance(known.get(name), Tensor):
            expected = known[name].shape
        if value.shape != expected:
            raise ValueError(
                f"{entry.path('base', name)} has shape {tuple(value.shape)}; "
                f"expected {tuple(expected)}"
            )


def restore_scalars(entry: Entry, state: MutableMapping[str, Any]) -> None:
    """Undo F's cast of 0-d tensors to the parameter's dtype: NAdam's products are float32."""
    for name, value in entry.base.items():
        if isinstance(value, Tensor) and value.dim() == 0 and isinstance(state[name], Tensor):
            state[name] = value.to(state[name].device, copy=True)


_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum"}
    | {"z"}  # schedule-free
)


@full_precision()
def fill(plan: Plan, entries: Mapping[Tensor, Entry], p_root: int) -> None:
    """Copy checkpointed blocks into a new plan.

    Raises:
        ValueError: If a block is missing, left over, truncated, or not finite; by key.
    """
    left_over = {p: set(entry.blocks) for p, entry in entries.items()}
    work = []
    for p, key, views, formats in plan.blocks():
        entry = entries.get(p)
        if entry is None or not (entry.blocks or entry.config.precondition):
            continue  # it was not preconditioned: its statistics start now
        left_over[p].discard(key)
        for side, leaves in views.items():
            order = next(iter(leaves.values())).shape[0]
            source = entry.config.format(order)
            saved = _checked(entry, key, side, source, order, p_root)
            work.append((leaves, formats[side], saved, source))
    for p, keys in left_over.items():
        if keys:
            raise ValueError(f"{entries[p].path(min(keys))} does not exist here: {_HINT}")
    for leaves, target, saved, source in work:
        for name, value in _converted(saved, source, target, p_root, leaves).items():
            leaves[name].copy_(value)


_HINT = (
    "the checkpoint was cut into other blocks; use the precondition, max_order, split, batch_dims "
    "and split_sizes that it was written with"
)


def _checked(entry: Entry, key: str, side: str, format: Format, order: int, p_root: int) -> Leaves:
    """The tensors of one side of a block, if they are what their format says."""
    if key not in entry.blocks:
        raise ValueError(f"{entry.path(key)} is missing: {_HINT}")
    held = entry.blocks[key]
    leaves: Leaves = {}
    for name, (shape, dtype) in make_method(format, p_root).layout(order).items():
        where = entry.path(key, side, name)
        try:
            value = held[side][name]
        except (KeyError, TypeError):
            raise ValueError(f"{where} is missing") from None
        if not isinstance(value, Tensor) or value.dtype != dtype:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{where} is {kind}; expected a tensor of {dtype}")
        if tuple(value.shape) != shape:
            raise ValueError(f"{where} has shape {tuple(value.shape)}; expected {shape}: {_HINT}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{where} holds non-finite values")
        leaves[name] = value
    return leaves


def _converted(saved: Leaves, source: Format, target: Format, p_root: int, views: Leaves) -> Leaves:
    """The tensors of one side in the target's format; the same ones where formats are equal."""
    if source == target:
        return saved
    device = next(iter(views.values())).device
    stack = {name: value.to(device).unsqueeze(0) for name, value in saved.items()}
    old, new = make_method(source, p_root), make_method(target, p_root)
    if (source.method, source.statistic) != (target.method, target.statistic):
        statistic = new.encode_matrix(old.matrix(stack).clone())
    else:
        statistic = {name: value for name, value in stack.items() if not is_root(name)}
    if source.root != target.root:
        root = new.root.encode(old.root.decode(stack).clone())
    else:
        root = {name: value for name, value in stack.items() if is_root(name)}
    return {name: value.squeeze(0) for name, value in (statistic | root).items()}
