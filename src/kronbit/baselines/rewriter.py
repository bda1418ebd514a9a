"""A loop around any first-order optimizer F: gradients are rewritten, and F takes the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from kronbit import first_order, outline
from kronbit.around import Around
from kronbit.base_loader import BaseLoader
from kronbit.checkpoint import Checkpoint, Entry
from kronbit.config import Config
from kronbit.distributed.placements import refuse
from kronbit.factors import Layout, Leaves
from kronbit.first_order import BaseFactory
from kronbit.gradients import overlaps_itself
from kronbit.nonfinite import elements
from kronbit.precision import full_precision
from kronbit.report import parameter_name
from kronbit.rules import graft_scale
from kronbit.state import checked_leaves


class Rewriter(Around, ABC):
    """Rewrites gradients in front of a first-order optimizer F.

    Where ``kronbit.optimizer.SecondOrder`` plans blocks and keeps factors, this only brings the
    loop, F and checkpoints: a subclass says what is kept and how a gradient is changed.

    Args:
        params: A ready optimizer, or parameters, param groups or named parameters.
        base: F, as for ``kronbit.Shampoo``. Default: ``"adamw"``.
        **options: F's own.

    Attributes:
        base: F; ``param_groups`` is F's own list.
        common: Tensors that belong to all parameters together, by name.
    """

    # Attributes that copies and pickles have beside those of every rewriter.
    _pickled: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        params: Optimizer | Iterable[Any] | None = None,
        base: str | BaseFactory | Optimizer | None = None,
        **options: Any,
    ) -> None:
        self.base = first_order.resolve(params, base, options)
        if isinstance(self.base, Rewriter):
            raise TypeError(
                f"{type(self.base).__name__} rewrites gradients already, and that is done once: "
                f"give {type(self).__name__} a first-order optimizer"
            )
        for index, group in enumerate(self.base.param_groups):
            self._check_group(group, index)  # before anything is changed
        self.check()
        self.common: Leaves = {}
        self._skipped: Tensor | None = None
        super().__init__(self.base.param_groups, dict(self.base.defaults))

    def check(self) -> None:
        """Refuse what cannot work; asked at construction and before every step.

        Raises:
            ValueError: If there are such parameters.
            RuntimeError: If there are such surroundings.
        """

    @abstractmethod
    def rewrite(self) -> None:
        """Change ``p.grad`` in place. Gradients are not recorded, and float32 is not shortened."""

    @abstractmethod
    def layout(self, p: Tensor) -> Layout:
        """The state of a parameter: name -> (shape, dtype); empty if it never has one."""

    def common_layout(self) -> Layout:
        """The same of ``common``, once there is a state."""
        return {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to F."""
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])  # to be read twice
        self._check_group(param_group, len(self.param_groups))
        self.base.add_param_group(param_group)

    def _check_group(self, group: Mapping[str, Any], index: int) -> None:
        for number, p in enumerate(first_order.tensors_of(group)):
            refuse(parameter_name(group, index, number), p, shards=False)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # as ours
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Rewrite the gradients, then one step of F; ``p.grad`` holds G̃ afterwards, not G.

        Args:
            closure: Evaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, or ``None``.
        """
        self.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with full_precision():
            self.rewrite()
        # W, s ← F(W, s, G̃)
        self.base.step()
        return loss

    # -------------------------------------------------------------------- for those who rewrite

    def _params(self) -> list[Tensor]:
        """All parameters."""
        return [p for group in self.param_groups for p in group["params"]]

    def _prepare(self, params: Iterable[Tensor]) -> None:
        """Refuse gradients that cannot be rewritten; copy those that cannot be written to."""
        grads = [(p, p.grad) for p in params if p.grad is not None]
        for p, grad in grads:
            if grad.layout != torch.strided:
                what, remedy = f"sparse ({grad.layout})", "build the embedding with sparse=False"
            elif grad.is_complex():
                what = f"complex ({grad.dtype})"
                remedy = "optimize torch.view_as_real of the parameter"
            else:
                continue
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is {what}, and "
                f"{type(self).__name__} rewrites dense, real ones alone: {remedy}"
            )
        for p, grad in grads:
            if overlaps_itself(grad):
                p.grad = grad.clone(memory_format=torch.contiguous_format)

    def _finite(self, also: Sequence[Tensor] = ()) -> Tensor:
        """Whether the step may be rewritten, as a flag on the device; it is counted if not.

        The host does not wait: both outcomes are computed, and the flag chooses.

        Args:
            also: What must be finite beside the gradients.
        """
        grads = [elements(p.grad) for p in self._params() if p.grad is not None]
        home = grads[0].device
        norms = [
            torch.linalg.vector_norm(x, dtype=wide(x.dtype)).to(home, torch.float64)
            for x in (*grads, *also)
        ]
        finite = torch.stack(norms).isfinite().all()
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=home)
        self._skipped += (~finite).to(self._skipped.device)
        return finite

    def diagnostics(self) -> dict[str, Any]:
        """Counters, from construction or the last ``load_state_dict``. Waits for the device."""
        return {"skipped_steps": 0 if self._skipped is None else int(self._skipped)}

    # ---------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors by parameter, those of all together, and F's whole state dict."""
        own = super().state_dict()
        return {**own, "common": dict(self.common), "base": self.base.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint, bit for bit.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            ValueError: If the checkpoint does not fit; the message names the key, and nothing has
                been changed.
        """
        state_dict = outline.copied(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        for key in ("state", "param_groups", "common", "base"):
            if key not in state_dict:
                raise ValueError(
                    f"{key!r} is missing: this is not a state dict of {type(self).__name__}"
                )
        entries = _by_parameter(state_dict, self.param_groups)
        try:
            state = {p: self._read(p, *entry) for p, entry in entries.items()}
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
        self.state = defaultdict(dict)
        for p, leaves in state.items():
            self.state[p] = _copied(leaves, p.device)
        self.common = _copied(common, self._params()[0].device)
        self._skipped = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _read(self, p: Tensor, key: Any, held: Any) -> Leaves:
        layout = self.layout(p)
        if not layout:
            raise ValueError(f"state[{key!r}] is of a parameter that has no state here")
        return checked_leaves(held, layout, f"state[{key!r}]")

    def __getstate__(self) -> dict[str, Any]:
        kept = ("defaults", "state", "base", "common", "_skipped", *self._pickled)
        return {name: getattr(self, name) for name in kept}


def zeros(layout: Layout, device: torch.device) -> Leaves:
    """A state of zeros.

    Args:
        layout: name -> (shape, dtype).
        device: Where to.
    """
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in layout.items()
    }


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what one computes with numbers of a dtype: float32, or float64 where they are."""
    return torch.promote_types(dtype, torch.float32)


def graft(G: Tensor, Ghat: Tensor, dtype: torch.dtype) -> Tensor:
    """G̃ = Ĝ ‖G‖ / (‖Ĝ‖ + 1e-12), within what the gradient's own dtype can hold."""
    scale = graft_scale(torch.linalg.vector_norm(G), torch.linalg.vector_norm(Ghat))
    # The norm is that of G, but one element may exceed what G's had: saturate.
    largest = torch.finfo(dtype).max
    return (Ghat * scale).clamp(-largest, largest)


def is_number(value: object) -> bool:
    """Whether a value is a real, finite number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_damping(damping: float) -> None:
    """Refuse a damping that leaves nothing to invert.

    Raises:
        ValueError: If it is not above 0.
    """
    if not is_number(damping) or damping <= 0:
        raise ValueError(f"damping must be a finite number above 0; got {damping!r}")


@dataclass(frozen=True)
class _EntryOfBase(Entry):
    """What a checkpoint says of one parameter of F, under F's own key."""

    def path(self, *keys: str) -> str:
        """The place of something in this entry, for messages."""
        inner = "".join(f"[{key!r}]" for key in keys if key != "base")
        return f"base['state'][{self.key!r}]{inner}"


def _base_loader(base: Optimizer, state_dict: Any) -> BaseLoader:
    """What loads F's part, its outline checked."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"base is {type(state_dict).__name__}; expected a state dict")
    entries: dict[Tensor, Entry] = {
        p: _EntryOfBase(key, 0, None, held, {}, Config())
        for p, (key, held) in _by_parameter(state_dict, base.param_groups, "base.").items()
    }
    # The checkpoint's keys of parameters and options, over the options that it lacks.
    pairs = zip(base.param_groups, state_dict["param_groups"], strict=True)
    groups = [{**group, **old} for group, old in pairs]
    return BaseLoader(base, Checkpoint(groups, entries))


def _by_parameter(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], prefix: str = ""
) -> dict[Tensor, tuple[Any, Any]]:
    """Parameter -> (its key in a state dict, what is held there); those without are left out."""
    outline.check(state_dict, groups, prefix)
    state, saved = state_dict["state"], state_dict["param_groups"]
    # Reading optimizer.state[p] of a parameter without state leaves an empty entry.
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
