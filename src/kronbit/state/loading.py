"""Loading of a state dict: check everything first, then convert blocks of another format.

``torch.optim.Optimizer.load_state_dict`` casts every tensor to the parameter's dtype: packed codes
would become floats, and float32 scales of bf16 parameters would be rounded. This module keeps every
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kronbit.config import FORMAT, FORMAT_KEY, STATISTICS_KEY, STRUCTURAL_OPTIONS, Config, Format
from kronbit.factors import Leaves, is_root, make_method
from kronbit.linalg.precision import PRODUCT_BITS, full_precision
from kronbit.state.binding import blocks_of
from kronbit.state.migration import up_to_date
from kronbit.state.validation import check_outline, checked_leaves, plain
from kronbit.step.schedule import AFTER_ALL_TURNS, first_preconditioned_step
from kronbit.step.state_plan import StatePlan


@dataclass(frozen=True)
class Entry:
    """The state of one parameter in a checkpoint.

    Attributes:
        key: The parameter's key in the checkpoint.
        step: Number of gradients that the parameter has seen.
        product_bits: Bits of the operands of L̂ G R̂; 0 if not preconditioned yet, None if unknown.
        base: F's state.
        blocks: Key -> state of each block.
        config: Options of the parameter's group in the checkpoint.
    """

    key: Any
    step: int
    product_bits: int | None
    base: Mapping[str, Any]
    blocks: Mapping[str, Any]
    config: Config

    def path(self, *keys: str) -> str:
        """Return the path of a value in this entry, for error messages."""
        return f"state[{self.key!r}]" + "".join(f"[{key!r}]" for key in keys)

    def lacks_roots(self) -> bool:
        """True if the parameter should be preconditioned at ``step`` but is not."""
        due_at = first_preconditioned_step(self.config, AFTER_ALL_TURNS)
        return bool(self.blocks) and self.product_bits == 0 and self.step >= due_at


@dataclass(frozen=True)
class Checkpoint:
    """A state dict, matched with the optimizer's parameters.

    Attributes:
        groups: The param groups after loading.
        entries: Parameter -> its entry.
    """

    groups: list[dict[str, Any]]
    entries: dict[Tensor, Entry]

    def owned_by(self, owns: Callable[[Tensor], bool]) -> Checkpoint:
        """Return the checkpoint without the blocks of parameters that other ranks own."""
        others = {p: replace(entry, blocks={}) for p, entry in self.entries.items() if not owns(p)}
        return replace(self, entries={**self.entries, **others})

    def parameters(
        self, groups: Sequence[Mapping[str, Any]], config: Config
    ) -> Iterator[tuple[Tensor, Config]]:
        """Yield the parameters that have an entry, with their options after loading."""
        for group, current in zip(self.groups, groups, strict=True):
            options = config.for_group(group)
            yield from ((p, options) for p in current["params"] if p in self.entries)

    def new_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return the optimizer's new state, without blocks or F's state."""
        state: dict[Tensor, dict[str, Any]] = {}
        for p, entry in self.entries.items():
            state[p] = {"step": entry.step}
            if entry.product_bits is not None:
                state[p]["product_bits"] = entry.product_bits
        return state


def read(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    configs: Sequence[Config],
    statistics: str,
) -> Checkpoint:
    """Match a state dict with the optimizer's groups and check its outline.

    A state dict of F alone is accepted. The second-order state then starts fresh.

    Raises:
        ValueError: If groups or entries do not match. The message names the key.
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
        # The checkpoint's options win, as in every torch optimizer, except for structural options.
        structural = {name: getattr(config, name) for name in STRUCTURAL_OPTIONS}
        current = {name: value for name, value in group.items() if name != "params"}
        kind = {FORMAT_KEY: FORMAT, STATISTICS_KEY: statistics}
        merged.append({**current, **old, **structural, **kind})
        try:
            saved_config = Config().for_group(old)
        except (TypeError, ValueError) as error:
            raise ValueError(f"param_groups[{index}]: {error}") from error
        for key, p in zip(old["params"], group["params"], strict=True):
            # Reading optimizer.state[p] creates an empty entry.
            if not state.get(key):
                continue
            if of_base_alone:
                entries[p] = Entry(key, 0, None, state[key], {}, saved_config)
            else:
                entries[p] = _read_entry(key, state[key], saved_config)
    return Checkpoint(merged, entries)


def _check_statistics(saved: Sequence[Mapping[str, Any]], expected: str) -> None:
    for index, old in enumerate(saved):
        kind = old.get(STATISTICS_KEY, expected)
        if kind != expected:
            raise ValueError(
                f"param_groups[{index}] has statistics of {kind}, but this optimizer needs "
                f"statistics of {expected}: Shampoo and CASPR can load each other's checkpoints, "
                "and so can KFAC and AdaBK; otherwise, load base.state_dict()"
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
    if not isinstance(product, (int, float, type(None))) or product not in (None, 0, *PRODUCT_BITS):
        raise ValueError(
            f"{label}['product_bits'] must be one of {(0, *PRODUCT_BITS)}; got {product!r}"
        )
    product = None if product is None else int(product)
    return Entry(key, int(step), product, value["base"], blocks_of(value), config)


_OTHER_BLOCKS = (
    "the checkpoint holds other blocks; set precondition, max_order, split, batch_dims and "
    "split_sizes as in the run that saved it; with blocks='local', use the same number of ranks"
)


@full_precision()
def fill(plan: StatePlan, entries: Mapping[Tensor, Entry]) -> None:
    """Copy the blocks of a checkpoint into a new plan.

    Raises:
        ValueError: If a block is missing, left over, or does not fit its format. The message names
            the key.
    """
    left_over = {parameter: set(entry.blocks) for parameter, entry in entries.items()}
    copies = []
    for p, key, row, sides in plan.blocks():
        entry = entries.get(p)
        if entry is None or not (entry.blocks or (entry.step and entry.config.precondition)):
            continue  # not preconditioned in the checkpoint: statistics start fresh
        if key not in entry.blocks:
            raise ValueError(f"{entry.path(key)} is missing: {_OTHER_BLOCKS}")
        left_over[p].discard(key)
        held = entry.blocks[key]
        if not isinstance(held, Mapping):
            raise ValueError(f"{entry.path(key)} is {type(held).__name__}; expected a dict")
        for side in held.keys() - sides.keys():
            raise ValueError(f"{entry.path(key, side)} is unknown")
        for side, factors in sides.items():
            source = entry.config.format(factors.order)
            layout = make_method(source).layout(factors.order)
            leaves = checked_leaves(held.get(side), layout, entry.path(key, side))
            copies.append((factors, row, leaves, source))
    for parameter, keys in left_over.items():
        if keys:
            raise ValueError(
                f"{entries[parameter].path(min(keys))} does not exist here: {_OTHER_BLOCKS}"
            )
    for factors, row, leaves, source in copies:
        views = factors.slot(row)
        for name, value in _converted(leaves, source, factors.format, factors.device).items():
            views[name].copy_(value)


def _converted(leaves: Leaves, source: Format, target: Format, device: torch.device) -> Leaves:
    """Convert the tensors of one side to the target's format."""
    if source == target:
        return leaves
    # Copy, since kernels read aligned words and a checkpoint's tensors may be unaligned.
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
    """Raise a positive semi-definite root to a power."""
    if exponent == 1:
        return root
    lam, V = torch.linalg.eigh(root.double())
    power: Tensor = ((V * lam.clamp(min=0).unsqueeze(-2) ** exponent) @ V.mT).float()
    return power
