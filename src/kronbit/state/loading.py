"""Loading a state dict: checked before anything changes, converted where the format differs.

The base class's ``load_state_dict`` casts every tensor to the parameter's dtype: packed codes would
become floats, and float32 scales under bf16 parameters would be rounded. So loading is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kronbit.config import (
    FORMAT,
    FORMAT_KEY,
    STATISTICS_KEY,
    STRUCTURAL_OPTIONS,
    Config,
    Format,
)
from kronbit.factors import Leaves, is_root, make_method
from kronbit.gpu.product_precision import WAYS
from kronbit.linalg.precision import full_precision
from kronbit.state.binding import blocks_of
from kronbit.state.migration import up_to_date
from kronbit.state.validation import check_outline, checked_leaves, plain
from kronbit.step.schedule import first_preconditioned_step
from kronbit.step.state_plan import StatePlan


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
        due = self.step >= first_preconditioned_step(self.config)
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

    def owned_by(self, owns: Callable[[Tensor], bool]) -> Checkpoint:
        """The part of a rank, which loads no blocks of parameters that others own."""
        others = {p: replace(entry, blocks={}) for p, entry in self.entries.items() if not owns(p)}
        return replace(self, entries={**self.entries, **others})

    def parameters(
        self, groups: Sequence[Mapping[str, Any]], config: Config
    ) -> Iterator[tuple[Tensor, Config]]:
        """Yield the parameters that have an entry, with the options that they will have."""
        for group, current in zip(self.groups, groups, strict=True):
            options = config.for_group(group)
            yield from ((p, options) for p in current["params"] if p in self.entries)

    def new_state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state but for blocks and F's part, which are put in afterwards."""
        state: dict[Tensor, dict[str, Any]] = {}
        for p, entry in self.entries.items():
            state[p] = {"step": entry.step}
            if entry.product_bits is not None:
                state[p]["product_bits"] = entry.product_bits
        return state

    def of_unknown_products(self) -> list[Tensor]:
        """Parameters of which the checkpoint does not say how their products are taken."""
        return [p for p, entry in self.entries.items() if entry.product_bits is None]


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
    check_outline(state_dict, groups)
    state, saved = state_dict["state"], state_dict["param_groups"]
    of_base_alone = bool(state) and not any("base" in entry for entry in state.values())
    if not of_base_alone:
        saved = up_to_date(saved, bool(state))
        if any(map(blocks_of, state.values())):
            _check_statistics(saved, statistics)
    merged, entries = [], {}
    for index, (old, group, config) in enumerate(zip(saved, groups, configs, strict=True)):
        # The checkpoint's numbers, as in every torch optimizer, but our own way of storing.
        own = {name: getattr(config, name) for name in STRUCTURAL_OPTIONS}
        rest = {name: value for name, value in group.items() if name != "params"}
        merged.append({**rest, **old, **own, FORMAT_KEY: FORMAT, STATISTICS_KEY: statistics})
        try:
            written = Config().for_group(old)
        except (TypeError, ValueError) as error:
            raise ValueError(f"param_groups[{index}]: {error}") from error
        for key, p in zip(old["params"], group["params"], strict=True):
            # reading optimizer.state[p] of a parameter without state leaves an empty entry
            if not state.get(key):
                continue
            if of_base_alone:
                entries[p] = Entry(key, 0, None, state[key], {}, written)
            else:
                entries[p] = _read_entry(key, state[key], written)
    return Checkpoint(merged, entries)


def _check_statistics(saved: Sequence[Mapping[str, Any]], expected: str) -> None:
    for index, old in enumerate(saved):
        found = old.get(STATISTICS_KEY, expected)
        if found != expected:
            raise ValueError(
                f"param_groups[{index}] has statistics of {found}, this optimizer takes those of "
                f"{expected}: Shampoo and CASPR share theirs, KFAC and AdaBK theirs; of others, "
                "only base.state_dict() can be loaded"
            )


def _read_entry(key: Any, value: Mapping[str, Any], config: Config) -> Entry:
    label = f"state[{key!r}]"
    for name in ("step", "base"):
        if name not in value:
            raise ValueError(f"{label}[{name!r}] is missing")
    step = plain(value["step"])
    if isinstance(step, bool) or not isinstance(step, (int, float)) or step < 0 or step % 1:
        raise ValueError(f"{label}['step'] must be a whole number >= 0; got {step!r}")
    if not isinstance(value["base"], Mapping):
        raise ValueError(f"{label}['base'] is {type(value['base']).__name__}; expected a dict")
    product = plain(value.get("product_bits"))
    if not isinstance(product, (int, float, type(None))) or product not in (None, 0, *WAYS):
        raise ValueError(f"{label}['product_bits'] must be one of {(0, *WAYS)}; got {product!r}")
    product = None if product is None else int(product)
    return Entry(key, int(step), product, value["base"], blocks_of(value), config)


_CUT = (
    "the checkpoint was cut into other blocks; use the precondition, max_order, split, batch_dims "
    "and split_sizes that it was written with, and with blocks='local' as many ranks"
)


@full_precision()
def fill(plan: StatePlan, entries: Mapping[Tensor, Entry]) -> None:
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
        held = entry.blocks[block.key]
        if not isinstance(held, Mapping):
            raise ValueError(f"{entry.path(block.key)} is {type(held).__name__}; expected a dict")
        for side in held.keys() - block.sides.keys():
            raise ValueError(f"{entry.path(block.key, side)} is unknown")
        for side, factors in block.sides.items():
            source = entry.config.format(factors.order)
            layout = make_method(source).layout(factors.order)
            leaves = checked_leaves(held.get(side), layout, entry.path(block.key, side))
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
