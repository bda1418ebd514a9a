"""Loading of F's state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from kronbit.base import state_on_meta
from kronbit.state.loading import Checkpoint, Entry
from kronbit.state.validation import check_base_state


class BaseLoader:
    """Loads F's state through F's ``load_state_dict``; checks it and keeps its dtypes.

    The expected state comes from a step of F on the meta device. If F cannot step there, missing
    values, types and shapes are not checked.
    """

    def __init__(self, base: Optimizer, checkpoint: Checkpoint) -> None:
        self._base, self._checkpoint = base, checkpoint
        params = [p for group in base.param_groups for p in group["params"]]
        groups = [
            {**group, "params": old["params"]}
            for group, old in zip(checkpoint.groups, base.param_groups, strict=True)
        ]
        try:
            states = state_on_meta(type(base), groups)
        except Exception:  # F does not run on the meta device
            states = {}
        self._expected = {p: states.get(i, {}) for i, p in enumerate(params)}

    def check(self) -> None:
        """Check the state of every parameter; see ``check_base_state``."""
        for p, entry in self._checkpoint.entries.items():
            check_base_state(entry.base, self._expected[p], type(self._base), entry.path("base"))

    def load(self) -> None:
        """Let F load its state, then undo casts to the parameter's dtype that F does not expect."""
        state = {e.key: dict(e.base) for e in self._checkpoint.entries.values() if e.base}
        base, before = self._base, dict(self._base.__dict__)
        try:
            base.load_state_dict({"state": state, "param_groups": self._checkpoint.groups})
            for p, entry in self._checkpoint.entries.items():
                if entry.base:
                    _undo_casts(entry, self._expected[p], base.state[p])
        except BaseException:
            base.__dict__.clear()
            base.__dict__.update(before)
            raise


def _undo_casts(entry: Entry, expected: Mapping[str, Any], state: MutableMapping[str, Any]) -> None:
    for name, value in entry.base.items():
        loaded, template = state.get(name), expected.get(name)
        if type(value) is not Tensor or type(loaded) is not Tensor:
            continue
        if isinstance(template, Tensor):
            dtype = template.dtype
        else:  # unknown: scalars keep their dtype, moments take the parameter's
            dtype = value.dtype if value.dim() == 0 else loaded.dtype
        if loaded.dtype != dtype:
            state[name] = value.to(device=loaded.device, dtype=dtype, copy=True)
