"""The loop of the paper's main algorithm around any first-order optimizer F."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit import checkpoint, first_order, memory, report
from kronbit.blocking import Blocking
from kronbit.config import FORMAT, FORMAT_KEY, GROUP_OPTIONS, OPTIONS, Config
from kronbit.first_order import BaseFactory
from kronbit.gradients import check_supported
from kronbit.nonfinite import NonfiniteGuard, zero_where_nonfinite
from kronbit.plan import Algorithm, Binding, Plan, route, structural_changes
from kronbit.precision import full_precision
from kronbit.work import Work, sort_by_device


class SecondOrder(Optimizer):
    """A second-order optimizer: it rewrites gradients and hands them to F.

    Use one of the algorithms, such as ``kronbit.Shampoo``.

    Attributes:
        base: F, the first-order optimizer; ``param_groups`` is F's own list.
        config: The options; a param group may override most of them.
    """

    algorithm: ClassVar[Algorithm]
    preset: ClassVar[Config] = Config()

    def __init__(
        self,
        params: Optimizer | Iterable[Any],
        base: str | BaseFactory | None = None,
        **options: Any,
    ) -> None:
        own = {name: options.pop(name) for name in OPTIONS if name in options}
        self.config = replace(self.preset, **own)
        self.base = first_order.resolve(params, base, options)
        for group in self.base.param_groups:
            self._check_group(group)  # before anything is changed
        self._group_defaults = {
            **{name: getattr(self.config, name) for name in GROUP_OPTIONS},
            FORMAT_KEY: FORMAT,
        }
        super().__init__(self.base.param_groups, {**self.base.defaults, **self._group_defaults})
        self.param_groups = self.base.param_groups
        self._start_unplanned()

    def _start_unplanned(self) -> None:
        """Nothing derived is known: the next step plans from ``param_groups`` and ``state``."""
        self._plan: Plan | None = None
        self._binding = Binding()
        self._routed: dict[Tensor, tuple[Config, torch.device, torch.Size]] = {}
        self._refreshed: set[Tensor] = set()
        self._linked: dict[Tensor, Any] = {}
        self._guards: dict[torch.device, NonfiniteGuard] = {}
        self._configs: dict[tuple[Any, ...], Config] = {}
        self._past_counts: Counter[str] = Counter()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to F's list; it may override our options for its parameters."""
        if any(param_group is group for group in self.base.param_groups):
            super().add_param_group(param_group)  # construction: F has the group already
            return
        if isinstance(param_group["params"], Iterator):
            param_group["params"] = list(param_group["params"])  # to be read twice
        self._check_group(param_group)
        self.base.add_param_group(param_group)
        for name, value in self._group_defaults.items():
            self.base.param_groups[-1].setdefault(name, value)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse bad options, and options that do not suit the group's parameters."""
        config = self.config.for_group(group)
        params = group["params"]
        for item in [params] if isinstance(params, Tensor) else params:
            p = item[1] if isinstance(item, tuple) else item  # named or not
            if isinstance(p, Tensor):
                route(p, config)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the algorithm, then one of F.

        Unless ``keep_gradients`` is set, ``p.grad`` holds G̃ afterwards, not G.

        Args:
            closure: Evaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, or ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = self._present()
        plan = self._prepare(present)
        with self._kept_gradients(present):
            with full_precision():
                for work in self._measured(present, plan):
                    preconditioner = work.preconditioner
                    # t % T1 = 0: L ← PU(L, G Gᵀ), R ← PU(R, Gᵀ G)
                    preconditioner.update(work.grads, work.finite, work.due(Config.updates_at))
                    # t % T2 = 0: L̂ ← PIRU(L), R̂ ← PIRU(R)
                    due = work.due(Config.refreshes_at)
                    preconditioner.refresh(due)
                    self._refreshed.update(work.params[i] for i in due)
                    # Ĝ = L̂ G R̂ and G̃ = Ĝ ‖G‖ / ‖Ĝ‖ in the place of G. While L̂ = R̂ = I, G̃ is G:
                    # nothing is computed, and the run is F's to the bit.
                    active = tuple(i for i, p in work.params.items() if p in self._refreshed)
                    zero = self.config.nonfinite == "zero"
                    preconditioner.precondition(work.grads, work.norms, work.finite, active, zero)
                    if zero:
                        self._zero_nonfinite(work, active)
            # W, s ← F(W, s, G̃)
            self.base.step()
        for p in present:
            self.state[p]["step"] += 1
            self._join_base_state(p)
        return loss

    # ----------------------------------------------------------------- what a step starts from

    def _present(self) -> dict[Tensor, Config]:
        """The parameters that have a gradient, with their options."""
        present = {}
        for group in self.param_groups:
            config = self._config_of(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if config.precondition:
                    check_supported(p.grad, self._name, p)
                present[p] = config
        return present

    def _config_of(self, group: Mapping[str, Any]) -> Config:
        """The options of a group; the same object as long as they are equal."""
        values = (group.get(name, getattr(self.config, name)) for name in GROUP_OPTIONS)
        key = tuple(tuple(value) if isinstance(value, list) else value for value in values)
        if key not in self._configs:
            self._configs[key] = self.config.for_group(group)
        return self._configs[key]

    def _prepare(self, present: Mapping[Tensor, Config]) -> Plan:
        """Plan parameters that are new, and anew where the state was changed from outside."""
        if self.param_groups is not self.base.param_groups:  # somebody assigned a new list
            self.base.param_groups = self.param_groups
        for guard in self._guards.values():
            guard.warn_once()
        routed = {p: (config, p.device, p.shape) for p, config in present.items()}
        unplanned = [
            p
            for p, config in present.items()
            if self._routed.get(p) != routed[p] and self._is_unplanned(p, config)
        ]
        if self._plan is None or unplanned or not self._binding.intact():
            self._plan = self._replanned(present)
        for p in present:
            self._start_state(p)
        self._routed = routed
        return self._plan

    def _is_unplanned(self, p: Tensor, config: Config) -> bool:
        """Whether a parameter needs a place for its state; refuses one whose state cannot fit."""
        if self._plan is None or p.device not in self._plan.preconditioners:
            return True
        place = self._plan.places.get(p)
        if place is None:
            return isinstance(route(p, config), Blocking)
        if place.shape != p.shape:
            raise ValueError(
                f"the shape of {self._name(p)} has changed from {tuple(place.shape)} to "
                f"{tuple(p.shape)} and its state does not fit: build a new optimizer"
            )
        changes = structural_changes(place.config, config)
        if changes:
            raise ValueError(
                f"{changes[0]} in the group of {self._name(p)}, but its state was made already: "
                "save state_dict(), build an optimizer with the new value and load it there"
            )
        return place.device != p.device

    def _replanned(self, present: Mapping[Tensor, Config]) -> Plan:
        """Lay all state out anew. What the state holds is copied over; the rest starts fresh."""
        plan = self._make_plan(
            (p, self._config_of(group))
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad or p in present or p in self.state
        )
        for p in plan.places:
            self._start_state(p)
        held = self._binding.bind(plan, self.state)
        self._refreshed = plan.refreshed() if held else set()
        if self._plan is not None:
            self._past_counts.update(report.fallback_counts(self._plan))
        return plan

    def _make_plan(self, params: Iterable[tuple[Tensor, Config]]) -> Plan:
        return Plan(params, self.algorithm, workspace=int(self.config.workspace_mb * 2**20))

    def _measured(self, present: Mapping[Tensor, Config], plan: Plan) -> list[Work]:
        """Norms and finiteness of all gradients, by device; raises if the user wants that."""
        times = {p: self.state[p]["step"] + 1 for p in present}
        works = sort_by_device(present, times, plan, self._guards)
        if self.config.nonfinite == "raise":
            bad = [p for work in works for p in work.nonfinite()]
            if bad:
                raise FloatingPointError(
                    f"{len(bad)} gradient(s) are not finite, that of {self._name(bad[0])} first, "
                    f"at its step {times[bad[0]]}; nothing was changed. With nonfinite='zero' the "
                    "step would go on without them"
                )
        return works

    def _zero_nonfinite(self, work: Work, active: tuple[int, ...]) -> None:
        """Zero what ``precondition`` did not write: identity roots, and what is left to F."""
        waiting = [i for i in work.params if i not in set(active)]
        params = [*(work.params[i] for i in waiting), *work.rest]
        finite = [*(work.finite[i] for i in waiting), *work.rest_finite]
        zero_where_nonfinite([p.grad for p in params if p.grad is not None], finite)

    @contextmanager
    def _kept_gradients(self, present: Iterable[Tensor]) -> Iterator[None]:
        """With ``keep_gradients``, let the step work on copies and put the originals back."""
        if not self.config.keep_gradients:
            yield
            return
        originals = [(p, p.grad) for p in present]
        try:
            for p, grad in originals:
                p.grad = None if grad is None else grad.clone()
            yield
        finally:
            for p, grad in originals:
                p.grad = grad

    # ---------------------------------------------------------------------------------- state

    def _start_state(self, p: Tensor) -> None:
        if "base" not in self.state[p] and p in self._linked:
            # somebody reset our state: F's part of it goes, too
            del self._linked[p]
            self.base.state.pop(p, None)
        self.state[p].setdefault("step", 0)
        self.state[p].setdefault("base", {})
        self._join_base_state(p)

    def _join_base_state(self, p: Tensor) -> None:
        """Make ``state[p]["base"]`` and F's own dict one, whichever of them was replaced."""
        held = self.state[p].get("base")
        if held and held is not self._linked.get(p, held):
            self.base.state[p] = held  # replaced in our state: by offloading, a device move, ...
        if p in self.base.state and "base" in self.state[p]:
            self.state[p]["base"] = self._linked[p] = self.base.state[p]

    def state_dict(self) -> dict[str, Any]:
        """The state: plain tensors keyed by parameter and block, and F's own under ``"base"``."""
        for p in self.state:
            self._join_base_state(p)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint, bit for bit, converting it where bits or method differ.

        Numbers of the param groups (``lr``, ``beta``, ``damping``, intervals, ...) are taken from
        the checkpoint, as in every torch optimizer; how the state is stored stays as it is here.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            ValueError: If the checkpoint does not fit; the message names the key, and nothing has
                been changed.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        checkpoint.check_groups(saved_groups, self.param_groups)
        groups = [
            checkpoint.merge_group(saved, group, self._config_of(group))
            for saved, group in zip(saved_groups, self.param_groups, strict=True)
        ]
        entries = checkpoint.read_entries(state_dict["state"], saved_groups, self.param_groups)
        for p, entry in entries.items():
            checkpoint.check_base(entry, p, self.base.state.get(p, {}))
        plan = self._make_plan(
            (p, self._config_of(group))
            for group, own in zip(groups, self.param_groups, strict=True)
            for p in own["params"]
            if p in entries
        )
        checkpoint.fill(plan, entries, self.algorithm.p)
        self.base.load_state_dict(
            {
                "state": {entry.key: dict(entry.base) for entry in entries.values() if entry.base},
                "param_groups": groups,
            }
        )
        self.param_groups = self.base.param_groups
        self.state = defaultdict(dict)
        self._start_unplanned()
        for p, entry in entries.items():
            checkpoint.restore_scalars(entry, self.base.state.get(p, {}))
            self.state[p]["step"] = entry.step
            self._start_state(p)
        if entries:
            self._binding.bind(plan, self.state)
            self._plan, self._refreshed = plan, plan.refreshed()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        own = ("base", "config", "_group_defaults")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_unplanned()

    # -------------------------------------------------------------------------------- F's modes

    def train(self) -> None:
        """Pass through to a schedule-free F; nothing to do for others."""
        if hasattr(self.base, "train"):
            self.base.train()

    def eval(self) -> None:
        """Pass through to a schedule-free F; nothing to do for others."""
        if hasattr(self.base, "eval"):
            self.base.eval()

    # -------------------------------------------------------------------------------- reporting

    def _name(self, p: Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for number, other in enumerate(group["params"]):
                if other is p:
                    return report.parameter_name(group, index, number)
        return "a parameter"

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind: ``{"statistics", "roots", "base", "total"}``."""
        return memory.account(self.state, self.base.state)

    def summary(self) -> str:
        """A table: parameter, shape, blocks, method, bits, bytes, or why it is left to F."""
        rows = [
            (report.parameter_name(group, index, number), p, self._config_of(group))
            for index, group in enumerate(self.param_groups)
            for number, p in enumerate(group["params"])
        ]
        return report.summary(type(self).__name__, rows, self.base, self.config, self.algorithm.p)

    def diagnostics(self) -> dict[str, Any]:
        """Counters of every fallback, and figures per group. Waits for the device."""
        skipped = sum(int(guard.skipped) for guard in self._guards.values())
        counts = {"skipped_gradients": skipped, **report.fallback_counts(self._plan)}
        for name, count in self._past_counts.items():
            counts[name] += count
        return {**counts, "groups": report.group_figures(self._plan)}
