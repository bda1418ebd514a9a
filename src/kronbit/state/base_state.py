"""Loading F's part of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit.base import state_on_meta
from kronbit.blocks.gradients import elements
from kronbit.state.binding import FLOATS, is_finite
from kronbit.state.loading import Checkpoint, Entry
from kronbit.state.outline import plain

# What torch's optimizers call their counters, and their sums and means of squares.
_NEVER_NEGATIVE = frozenset(
    ("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum")
)

_COMPARED = frozenset((*FLOATS, torch.int32, torch.int64))


class BaseLoader:
    """Loads F's part of a checkpoint through F's own ``load_state_dict``, checked and exact.

    What F should hold is learned from a step on the meta device, where F can take one.

    Args:
        base: F.
        checkpoint: The checkpoint.
    """

    def __init__(self, base: Optimizer, checkpoint: Checkpoint) -> None:
        self._base, self._checkpoint = base, checkpoint
        self._of_torch = type(base).__module__.startswith("torch.optim.")
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
                never_negative = self._of_torch and name in _NEVER_NEGATIVE
                _check_numbers(entry.path("base", str(name)), value, never_negative)
            for name, expected in self._expected[p].items() if entry.base else ():
                if name not in entry.base:
                    raise ValueError(
                        f"{entry.path('base', name)} is missing: {type(self._base).__name__} needs "
                        "it; was the checkpoint written around another base?"
                    )
                value = entry.base[name]
                if not isinstance(expected, Tensor):
                    continue
                if not isinstance(value, Tensor):
                    # Counters may be plain numbers; torch's SGD begins a momentum that is None.
                    counter = not expected.dim() and isinstance(plain(value), (int, float))
                    if not counter and (name, value) != ("momentum_buffer", None):
                        raise ValueError(
                            f"{entry.path('base', name)} is {type(value).__name__}; expected a "
                            "tensor"
                        )
                elif value.shape != expected.shape:
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


def _check_numbers(where: str, value: Any, never_negative: bool) -> None:
    if type(value) is Tensor:  # not of a shard, which ranks would have to look at together
        if value.is_meta:
            raise ValueError(f"{where} is on the meta device: it has no numbers")
        numbers = elements(value)
        if not is_finite(numbers):
            raise ValueError(f"{where} holds non-finite values")
        if never_negative and numbers.dtype in _COMPARED and bool((numbers < 0).any()):
            raise ValueError(f"{where} holds negative values")
    elif never_negative and isinstance(plain(value), (int, float)) and not 0 <= value < math.inf:
        raise ValueError(f"{where} must be a number >= 0; got {value!r}")


@contextmanager
def _restored_on_error(base: Optimizer) -> Iterator[None]:
    before = dict(base.__dict__)
    try:
        yield
    except BaseException:
        base.__dict__.clear()
        base.__dict__.update(before)
        raise
