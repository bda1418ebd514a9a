"""Loading a state dict: checked before anything changes, converted where the format differs.

The base class's ``load_state_dict`` casts every tensor to the parameter's dtype: packed codes would
become floats, and float32 scales under bf16 parameters would be rounded. So loading is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit.config import (
    FORMAT,
    FORMAT_KEY,
    STATISTICS_KEY,
    STRUCTURAL_OPTIONS,
    Config,
    Format,
)
from kronbit.factors import Leaves, is_root, make_method
from kronbit.first_order import state_on_meta
from kronbit.kernel_products import WAYS
from kronbit.migration import up_to_date
from kronbit.plan import Plan
from kronbit.precision import full_precision
from kronbit.state import blocks_of, checked_leaves, is_finite


@dataclass(frozen=True)
class Entry:
    """What a checkpoint says of one parameter.

    Attributes:
        key: Its key in the checkpoint.
        step: Gradients that it has seen.
        product_bits: How its products are taken, 0 before it is preconditioned; ``None``: unknown.
        base: F's own state.
        blocks: Key -> state of each block.
        config: The options it was written with.
    """

    key: Any
    step: int
    product_bits: int | None
    base: Mapping[str, Any]
    blocks: Mapping[str, Any]
    config: Config

    def path(self, *keys: str) -> str:
        """The place of something in this entry, for messages."""
        return f"state[{self.key!r}]" + "".join(f"[{key!r}]" for key in keys)

    def lacks_roots(self) -> bool:
        """Whether it should be preconditioned by now, but is not."""
        due = self.step >= self.config.first_preconditioned_step()
        return bool(self.blocks) and self.product_bits == 0 and due


@dataclass(frozen=True)
class Checkpoint:
    """A state dict, its outline checked.

    Attributes:
        groups: The param groups as they will be.
        entries: Parameter -> what is known of it.
    """

    groups: list[dict[str, Any]]
    entries: dict[Tensor, Entry]

    def without_blocks_of(self, params: Iterable[Tensor]) -> Checkpoint:
        """What is left for a rank that does not have the blocks of some parameters."""
        others = {p: replace(self.entries[p], blocks={}) for p in params}
        return replace(self, entries={**self.entries, **others})


def read(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    configs: Sequence[Config],
    statistics: str,
) -> Checkpoint:
    """Match a state dict with the optimizer's groups and check its outline.

    A state dict of F alone is taken, too: the second-order state starts fresh then.

    Args:
        state_dict: What is to be loaded.
        groups: The optimizer's param groups.
        configs: Their options.
        statistics: What the optimizer's are made of.

    Raises:
        ValueError: If groups or entries do not match; by key.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"{key!r} is missing: this is not a state dict of an optimizer")
    state, saved = state_dict["state"], state_dict["param_groups"]
    _check_groups(saved, groups)
    of_base_alone = bool(state) and not any(
        isinstance(entry, Mapping) and "base" in entry for entry in state.values()
    )
    if not of_base_alone:
        saved = up_to_date(saved, bool(state))
        if any(isinstance(entry, Mapping) and blocks_of(entry) for entry in state.values()):
            _check_statistics(saved, statistics)
    merged, entries = [], {}
    for old, group, config in zip(saved, groups, configs, strict=True):
        # The checkpoint's numbers, as in every torch optimizer, but our own way of storing.
        own = {name: getattr(config, name) for name in STRUCTURAL_OPTIONS}
        rest = {name: value for name, value in group.items() if name != "params"}
        merged.append({**rest, **old, **own, FORMAT_KEY: FORMAT, STATISTICS_KEY: statistics})
        written = Config().for_group(old)
        for key, p in zip(old["params"], group["params"], strict=True):
            # reading optimizer.state[p] of a parameter without state leaves an empty entry
            if key not in state or state[key] == {}:
                continue
            if of_base_alone:
                entries[p] = Entry(key, 0, None, state[key], {}, written)
            else:
                entries[p] = _read_entry(key, state[key], written)
    keys = {key for group in saved for key in group["params"]}
    for key in state.keys() - keys:
        raise ValueError(f"state[{key!r}] belongs to no parameter of the checkpoint's param_groups")
    return Checkpoint(merged, entries)


def _check_groups(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    if len(saved) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved)} param groups, the optimizer has {len(groups)}"
        )
    for index, (old, group) in enumerate(zip(saved, groups, strict=True)):
        if "params" not in old:
            raise ValueError(f"param_groups[{index}]['params'] is missing")
        if len(old["params"]) != len(group["params"]):
            raise ValueError(
                f"param_groups[{index}] has {len(old['params'])} parameters in the checkpoint and "
                f"{len(group['params'])} in the optimizer"
            )


def _check_statistics(saved: Sequence[Mapping[str, Any]], expected: str) -> None:
    for index, old in enumerate(saved):
        found = old.get(STATISTICS_KEY, expected)
        if found != expected:
            raise ValueError(
                f"param_groups[{index}] has statistics of {found}, this optimizer takes those of "
                f"{expected}: Shampoo and CASPR share theirs, KFAC and AdaBK theirs; of others, "
                "only base.state_dict() can be loaded"
            )


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
    product = value.get("product_bits")
    product = product.item() if isinstance(product, Tensor) and product.numel() == 1 else product
    if product not in (None, 0, *WAYS):
        raise ValueError(f"{label}['product_bits'] must be one of {(0, *WAYS)}; got {product!r}")
    product = None if product is None else int(product)
    return Entry(key, int(step), product, value["base"], blocks_of(value), config)


_CUT = (
    "the checkpoint was cut into other blocks; use the precondition, max_order, split, batch_dims "
    "and split_sizes that it was written with, and with blocks='local' as many ranks"
)


@full_precision()
def fill(plan: Plan, entries: Mapping[Tensor, Entry]) -> None:
    """Copy checkpointed blocks into a new plan.

    Args:
        plan: Freshly made.
        entries: The checkpoint's parameters.

    Raises:
        ValueError: If a block is missing, left over, or not what its format says; by key.
    """
    left_over = {parameter: set(entry.blocks) for parameter, entry in entries.items()}
    work = []
    for block in plan.blocks():
        entry = entries.get(block.p)
        if entry is None or not (entry.blocks or (entry.step and entry.config.precondition)):
            continue  # it was not preconditioned: its statistics start now
        if block.key not in entry.blocks:
            raise ValueError(f"{entry.path(block.key)} is missing: {_CUT}")
        left_over[block.p].discard(block.key)
        for side, factors in block.sides.items():
            source = entry.config.format(factors.order)
            layout = make_method(source).layout(factors.order)
            held = entry.blocks[block.key]
            leaves = checked_leaves(
                held.get(side) if isinstance(held, Mapping) else None,
                layout,
                entry.path(block.key, side),
            )
            work.append((factors, block.row, leaves, source))
    for parameter, keys in left_over.items():
        if keys:
            raise ValueError(f"{entries[parameter].path(min(keys))} does not exist here: {_CUT}")
    for factors, row, leaves, source in work:
        views = factors.slot(row)
        for name, value in _converted(leaves, source, factors.format, factors.device).items():
            views[name].copy_(value)


def _converted(leaves: Leaves, source: Format, target: Format, device: torch.device) -> Leaves:
    """The tensors of one side in the target's format; the same ones where formats are equal."""
    if source == target:
        return leaves
    # Copies: kernels read words, and a checkpoint's tensors may begin anywhere.
    stack = {
        name: value.to(device, copy=True, memory_format=torch.contiguous_format).unsqueeze(0)
        for name, value in leaves.items()
    }
    old, new = make_method(source), make_method(target)
    if source.statistic_part != target.statistic_part:
        statistic = new.encode_matrix(old.matrix(stack).clone())
    else:
        statistic = {name: value for name, value in stack.items() if not is_root(name)}
    if source.root_part != target.root_part:
        root = new.root.encode(_power(old.root.decode(stack).clone(), source.p / target.p))
    else:
        root = {name: value for name, value in stack.items() if is_root(name)}
    return {name: value.squeeze(0) for name, value in (statistic | root).items()}


def _power(root: Tensor, exponent: float) -> Tensor:
    """A root, which is positive semi-definite, as that of another exponent."""
    if exponent == 1:
        return root
    lam, V = torch.linalg.eigh(root.double())
    found: Tensor = ((V * lam.clamp(min=0).unsqueeze(-2) ** exponent) @ V.mT).float()
    return found


class BaseLoader:
    """Loads F's part of a checkpoint through F's own ``load_state_dict``, checked and exact.

    What F should hold is learned from a step on the meta device, where F can take one.

    Args:
        base: F.
        checkpoint: The checkpoint.
    """

    def __init__(self, base: Optimizer, checkpoint: Checkpoint) -> None:
        self._base, self._checkpoint = base, checkpoint
        own = [p for group in base.param_groups for p in group["params"]]
        groups = [
            {**group, "params": old["params"]}
            for group, old in zip(checkpoint.groups, base.param_groups, strict=True)
        ]
        try:
            states = state_on_meta(type(base), groups)
        except Exception:  # it does not run there: then nothing can be checked
            states = {}
        self._expected = {p: states.get(i, {}) for i, p in enumerate(own)}

    def check(self) -> None:
        """Refuse a state that F could not work with: a tensor is missing, of a wrong shape, NaN."""
        for p, entry in self._checkpoint.entries.items():
            for name, value in entry.base.items():
                if type(value) is Tensor and not is_finite(value):
                    raise ValueError(f"{entry.path('base', name)} holds non-finite values")
            for name, expected in self._expected[p].items() if entry.base else ():
                if name not in entry.base:
                    raise ValueError(
                        f"{entry.path('base', name)} is missing: {type(self._base).__name__} needs "
                        "it; was the checkpoint written around another base?"
                    )
                value = entry.base[name]
                tensors = isinstance(value, Tensor) and isinstance(expected, Tensor)
                if tensors and value.shape != expected.shape:
                    raise ValueError(
                        f"{entry.path('base', name)} has shape {tuple(value.shape)}; expected "
                        f"{tuple(expected.shape)}"
                    )

    def load(self) -> None:
        """Let F load; undo its cast to the parameter's dtype where F itself holds another."""
        state = {e.key: dict(e.base) for e in self._checkpoint.entries.values() if e.base}
        with _restored_on_error(self._base):
            self._base.load_state_dict({"state": state, "param_groups": self._checkpoint.groups})
            for p, entry in self._checkpoint.entries.items():
                if entry.base:
                    self._undo_cast(entry, self._expected[p], self._base.state[p])

    def _undo_cast(
        self, entry: Entry, expected: Mapping[str, Any], state: MutableMapping[str, Any]
    ) -> None:
        for name, value in entry.base.items():
            loaded, own = state.get(name), expected.get(name)
            if type(value) is not Tensor or type(loaded) is not Tensor:
                continue
            if isinstance(own, Tensor):
                dtype = own.dtype
            else:  # unknown: counters and products keep their dtype, moments take the parameter's
                dtype = value.dtype if value.dim() == 0 else loaded.dtype
            if loaded.dtype != dtype:
                state[name] = value.to(device=loaded.device, dtype=dtype, copy=True)


@contextmanager
def _restored_on_error(base: Optimizer) -> Iterator[None]:
    before = dict(base.__dict__)
    try:
        yield
    except BaseException:
        base.__dict__.clear()
        base.__dict__.update(before)
        raise
