"""Base class of optimizers that rewrite gradients before a first-order optimizer F takes a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.linalg import vector_norm
from torch.optim import Optimizer

from kronbit.base import BaseFactory, Wrapper, resolve, tensors_of
from kronbit.blocks.gradients import elements, overlaps_itself
from kronbit.config import Config
from kronbit.distributed.sharding import refuse
from kronbit.factors import Layout, Leaves
from kronbit.linalg.precision import full_precision
from kronbit.messages import parameter_name
from kronbit.rules import graft_scale
from kronbit.state.base_state import BaseLoader
from kronbit.state.loading import Checkpoint, Entry
from kronbit.state.validation import check_outline, checked_leaves


class Rewriter(Wrapper, ABC):
    """An optimizer that rewrites gradients before a first-order optimizer F takes the step.

    This class provides the step, F and checkpoints. It has no blocks or factors, unlike
    ``kronbit.optimizer.SecondOrder``. A subclass defines the state and how gradients change.
    """

    # Attributes of a subclass that are copied and pickled.
    _pickled: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        params: Optimizer | Iterable[Any] | None = None,
        base: str | BaseFactory | Optimizer | None = None,
        **options: Any,
    ) -> None:
        self.base = resolve(params, base, options)
        if isinstance(self.base, Rewriter):
            raise TypeError(
                f"{type(self.base).__name__} rewrites gradients already, and cannot be a base: "
                f"pass {type(self).__name__} a first-order optimizer"
            )
        for index, group in enumerate(self.base.param_groups):
            self._check_group(group, index)  # before anything is changed
        self.check()
        self.common: Leaves = {}  # state that all parameters share
        self._skipped: Tensor | int = 0
        super().__init__(self.base.param_groups, dict(self.base.defaults))

    def check(self) -> None:
        """Check parameters and process groups, at construction and before every step."""

    @abstractmethod
    def rewrite(self) -> None:
        """Change ``p.grad`` in place. Runs without autograd and with full float32 precision."""

    @abstractmethod
    def layout(self, p: Tensor) -> Layout:
        """Return shape and dtype of each state tensor of a parameter; empty if it has no state."""

    def common_layout(self) -> Layout:
        """Return shape and dtype of each tensor of ``common`` after the first step."""
        return {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to F."""
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])  # may be an iterator
        self._check_group(param_group, len(self.param_groups))
        self.base.add_param_group(param_group)

    def _check_group(self, group: Mapping[str, Any], index: int) -> None:
        for number, p in enumerate(tensors_of(group)):
            refuse(parameter_name(group, index, number), p, shards=False)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # as for SecondOrder.step
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Rewrite the gradients and take one step of F. ``p.grad`` holds G̃ afterwards, not G.

        The closure reevaluates the model once. Its loss is returned.
        """
        self.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with full_precision():
            self.rewrite()
        self.base.step()  # W, s ← F(W, s, G̃)
        return loss

    # -------------------------------------------------------------------------- for subclasses

    def _params(self) -> list[Tensor]:
        """Return all parameters."""
        return [p for group in self.param_groups for p in group["params"]]

    def _prepare(self, params: Iterable[Tensor]) -> None:
        """Refuse sparse and complex gradients, and copy gradients whose elements share memory."""
        for p in params:
            grad = p.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                kind, remedy = f"sparse ({grad.layout})", "build the embedding with sparse=False"
            elif grad.is_complex():
                kind = f"complex ({grad.dtype})"
                remedy = "optimize torch.view_as_real of the parameter"
            else:
                if overlaps_itself(grad):
                    p.grad = grad.clone(memory_format=torch.contiguous_format)
                continue
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is {kind}, and "
                f"{type(self).__name__} needs dense, real gradients: {remedy}"
            )

    def _started(self, p: Tensor) -> Leaves:
        """Return the state of a parameter. All values are 0 at first."""
        if not self.state[p]:
            self.state[p] = zeros(self.layout(p), p.device)
        state: Leaves = self.state[p]
        return state

    def _finite(self, also: Sequence[Tensor] = ()) -> Tensor:
        """Return True if the gradients and ``also`` are finite; else count a skipped step.

        The flag stays on the device, so the caller computes both results and selects one with it.
        """
        grads = [elements(p.grad) for p in self._params() if p.grad is not None]
        home = grads[0].device
        tensors = (*grads, *also)
        norms = [vector_norm(x, dtype=wide(x.dtype)).to(home, torch.float64) for x in tensors]
        finite = torch.stack(norms).isfinite().all()
        self._skipped = torch.as_tensor(self._skipped, device=home) + ~finite
        return finite

    def diagnostics(self) -> dict[str, Any]:
        """Return counters since construction or ``load_state_dict``. Waits for the device."""
        return {"skipped_steps": int(self._skipped)}

    # ---------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter, the common state, and F's state dict under ``"base"``."""
        return super().state_dict() | {"common": dict(self.common), "base": self.base.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint exactly.

        Raises:
            ValueError: If an entry is missing or does not match. The message names its key, and
                the optimizer is unchanged.
        """
        state_dict = self._state_dict_to_load(state_dict)
        for key in ("state", "param_groups", "common", "base"):
            if key not in state_dict:
                raise ValueError(
                    f"{key!r} is missing: this is not a state dict of {type(self).__name__}"
                )
        entries = _by_parameter(state_dict, self.param_groups)
        state = {}
        try:
            for p, (key, held) in entries.items():
                layout = self.layout(p)
                if not layout:
                    raise ValueError(f"state[{key!r}] belongs to a parameter without state here")
                state[p] = checked_leaves(held, layout, f"state[{key!r}]")
            layout = self.common_layout() if state or state_dict["common"] else {}
            common = checked_leaves(state_dict["common"], layout, "common")
        except ValueError as error:
            raise ValueError(
                f"{error}. Build {type(self).__name__} with the model and the options that the "
                "checkpoint was written with"
            ) from error
        base = _base_loader(self.base, state_dict["base"])
        base.check()
        base.load()
        self.state = defaultdict(dict, {p: _copied(held, p.device) for p, held in state.items()})
        self.common = _copied(common, self._params()[0].device)
        self._skipped = 0
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("defaults", "state", "base", "common", "_skipped", *self._pickled)
        return {name: getattr(self, name) for name in kept}


def zeros(layout: Layout, device: torch.device) -> Leaves:
    """Create a state of zeros."""
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in layout.items()
    }


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def graft(G: Tensor, Ghat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return G̃ = Ĝ ‖G‖ / (‖Ĝ‖ + 1e-12), clamped to the range of the gradient's dtype."""
    scale = graft_scale(vector_norm(G), vector_norm(Ghat))
    # G̃ has the norm of G, but a single element may be larger than any of G and overflow.
    largest = torch.finfo(dtype).max
    return (Ghat * scale).clamp(-largest, largest)


def is_number(value: object) -> bool:
    """True if a value is a finite int or float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_damping(damping: float) -> None:
    """Refuse a damping that is not positive: the damped matrix would have no inverse."""
    if not is_number(damping) or damping <= 0:
        raise ValueError(f"damping must be a finite number above 0; got {damping!r}")


class _EntryOfBase(Entry):
    """The state of one parameter of F in a checkpoint."""

    def path(self, *keys: str) -> str:
        """Return the path of F's state for messages."""
        return f"base['state'][{self.key!r}]"


def _base_loader(base: Optimizer, state_dict: Any) -> BaseLoader:
    """Check the outline of F's state dict, and return its loader."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"base is {type(state_dict).__name__}; expected a state dict")
    entries: dict[Tensor, Entry] = {
        p: _EntryOfBase(key, 0, None, held, {}, Config())
        for p, (key, held) in _by_parameter(state_dict, base.param_groups, "base.").items()
    }
    # Options that the checkpoint lacks keep their values.
    pairs = zip(base.param_groups, state_dict["param_groups"], strict=True)
    groups = [{**group, **old} for group, old in pairs]
    return BaseLoader(base, Checkpoint(groups, entries))


def _by_parameter(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], prefix: str = ""
) -> dict[Tensor, tuple[Any, Any]]:
    """Map each parameter with state to its key and its entry in a state dict."""
    check_outline(state_dict, groups, prefix)
    state, saved = state_dict["state"], state_dict["param_groups"]
    # An entry may be empty: reading optimizer.state[p] creates one.
    return {
        p: (key, state[key])
        for old, group in zip(saved, groups, strict=True)
        for key, p in zip(old["params"], group["params"], strict=True)
        if state.get(key)
    }


def _copied(leaves: Leaves, device: torch.device) -> Leaves:
    return {
        name: value.to(device, copy=True, memory_format=torch.contiguous_format)
        for name, value in leaves.items()
    }
