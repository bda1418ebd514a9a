"""The loop of the paper's main algorithm around any first-order optimizer F."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from kronbit.base import BaseFactory, Wrapper, resolve
from kronbit.blocks.gradients import StepGradients, collect, plain_dtypes
from kronbit.config import Config, take_options
from kronbit.distributed.ranks import Ranks, agreement_lines, find_ranks
from kronbit.interruptions import run_then
from kronbit.reporting.diagnostics import diagnostics, fallback_counts
from kronbit.reporting.memory import account
from kronbit.reporting.summary import summary
from kronbit.reporting.warnings import warn_after_loading, warn_if_few
from kronbit.routing import ParamGroups
from kronbit.rules import Algorithm
from kronbit.state.base_state import BaseLoader
from kronbit.state.binding import StateKeeper, blocks_of
from kronbit.state.loading import fill, read
from kronbit.statistics import GradientStatistics, Statistics
from kronbit.step.failures import Stage, refuse_capture, report_failure, without_gradients, writable
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.schedule import any_due, expected_updates
from kronbit.step.state_plan import StatePlan
from kronbit.step.step_plan import DevicePlan, StepPlan, refuse_nonfinite

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SecondOrder(Wrapper):
    """Base class of the second-order optimizers, which rewrite gradients before F takes the step.

    Use one of the algorithms, such as ``kronbit.Shampoo``.

    Attributes:
        base: F, the first-order optimizer; ``param_groups`` is F's list.
        config: The options; a param group may override most of them.
    """

    algorithm: ClassVar[Algorithm]

    def __init__(
        self,
        params: Optimizer | Iterable[Any] | None = None,
        base: str | BaseFactory | Optimizer | None = None,
        *,
        process_group: ProcessGroup | Literal[False] | None = None,
        **options: Any,
    ) -> None:
        self.config = take_options(options, self.algorithm.options)
        self._process_group = process_group
        self._known_ranks: Ranks | None = None
        self.base = resolve(params, base, options)
        self._statistics = self._make_statistics()
        self._groups = ParamGroups(self.base, self.config, self._statistics)
        self._groups.adopt()
        self._groups.check()  # before anything is changed
        super().__init__(self.base.param_groups, {**self.base.defaults, **self._groups.defaults})
        self._start_unplanned()
        self._expect_statistics()

    def _make_statistics(self) -> Statistics:
        return GradientStatistics()

    def _start_unplanned(self) -> None:
        """Drop all derived data: the next step plans from ``param_groups`` and ``state`` alone."""
        self._keeper = StateKeeper()
        self._keeper.base_link.join(self.state, self.base.state)
        self._guards: dict[torch.device, NonfiniteGuard] = {}
        self._past_counts: Counter[str] = Counter()
        self._past_counts.subtract(self._statistics.counts())  # count from zero again

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to F. Its options override those of the optimizer."""
        if isinstance(param_group, dict) and isinstance(param_group["params"], Iterator):
            param_group["params"] = list(param_group["params"])  # an iterator can be read only once
        self._groups.check_new(param_group)
        self.base.add_param_group(param_group)
        self._groups.complete()
        # While __init__ runs, there is no plan yet. Use hasattr, because Lightning's wrapper
        # forwards attributes, but has another __dict__.
        if hasattr(self, "_keeper"):
            self._groups.adopt()
            if self._known_ranks is not None:
                self._known_ranks.grow(self._find_ranks())
            self._expect_statistics()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # the host decides what is due, so the step cannot be compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of the algorithm, then one of F.

        Unless ``keep_gradients`` is set, ``p.grad`` holds G̃ afterwards, not G.

        Args:
            closure: Evaluates the model and returns the loss, which ``step`` returns; called once.
        """
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        with report_failure(self.config) as stage, writable(gradients, self.config) as gradients:
            with self._matrices(gradients) as plan:  # whole gradients, [W | b]; measured, scheduled
                for device in plan.devices:
                    # t % T1 = 0: L ← PU(L, G Gᵀ), R ← PU(R, Gᵀ G), or with another M
                    if device.updates:
                        device.update(self._statistics)
                    # t % T2 = 0: L̂ ← PIRU(L), R̂ ← PIRU(R)
                    if device.refreshes:
                        device.refresh()
                    # Ĝ = L̂ G R̂, and G̃ = Ĝ ‖G‖ / ‖Ĝ‖ for G. While L̂ = R̂ = I, G̃ is G.
                    stage.rewriting = True
                    self._rewrite(device)
            # t ← t + 1; W, s ← F(W, s, G̃), where W are the weights and s is F's state
            self._count_and_step(plan, stage)
            self._after_step(plan)
            return loss  # inside report_failure: an interrupt here must say that the step counts

    # Seams: an algorithm may supply the direction, and may step some parameters instead of F.

    def _rewrite(self, device: DevicePlan) -> None:
        """Write the direction, G̃, over the gradients of a device."""
        device.precondition()

    def _params_not_for_base(self) -> Sequence[Tensor]:
        """Return the parameters that ``_step_params`` steps. F steps all others."""
        return ()

    def _step_params(self, params: Sequence[Tensor]) -> None:
        """Step these parameters, after F. ``p.grad`` holds the direction, or None."""

    def _count_and_step(self, plan: StepPlan, stage: Stage) -> None:
        """Take the step, and count it only if it completes, even if F fails or Ctrl-C arrives."""
        steps, params = [entry["step"] for entry in plan.entries], self._params_not_for_base()

        def count_and_step() -> None:
            plan.set_steps(t + 1 for t in steps)  # before F's step, as hooks of F expect
            without_gradients(params, self.base.step)
            self._step_params(params)
            stage.complete = True

        def settle_or_undo() -> None:
            if stage.complete:
                plan.settle()
            else:
                plan.set_steps(steps)

        stage.in_base = True
        run_then(count_and_step, settle_or_undo)

    def _after_step(self, plan: StepPlan) -> None:
        """Run host-side checks and prepare the next step, while the GPU is busy."""
        self._keeper.after_step(plan, self.state, self.base.state)
        for guard in self._guards.values():
            guard.warn_once()
        self._expect_statistics()

    # --------------------------------------------------------------------------- before the step

    def _gradients(self) -> StepGradients:
        """Collect parameters with a gradient; at the first step, agree with the other ranks."""
        groups, route = self._groups, self._statistics.route
        groups.complete()
        gradients = collect(self.base.param_groups, groups.config_of, route, groups.name)
        if not self._ranks.agreed:
            if self._keeper.plan is None:  # Accelerate loads an empty state, then shards
                groups.check()
                groups.adopt()
                self._known_ranks = None
            self._ranks.agree(lambda: agreement_lines(self, self.base, self.config, self.state))
        return gradients

    @contextmanager
    def _matrices(self, gradients: StepGradients) -> Iterator[StepPlan]:
        """Provide the step's plan with whole, measured matrices; write them back at the end."""
        ranks, statistics = self._ranks, self._statistics
        due = partial(any_due, gradients, self.state)
        with nullcontext(gradients) if ranks.alone else ranks.whole(gradients, due) as whole:
            plan, whole = self._keeper.step_plan(
                whole, self.state, self.base.state, self._groups.name, self._replan
            )
            grads, planned = whole.grads, plan.state_plan.locations
            collected = statistics.collects and statistics.matrices(plan.params, planned, grads)
            with collected or nullcontext(grads) as matrices:
                dtypes = whole.dtypes if matrices is grads else plain_dtypes(matrices)
                with plan.measured(matrices, dtypes, self._guards, self.config):
                    if self.config.nonfinite == "raise":
                        refuse_nonfinite(plan.devices, ranks.any_rank, self._groups.name)
                    yield plan

    def _replan(self, present: Collection[Tensor]) -> StatePlan:
        """Lay out all state anew. Existing values are copied; missing ones start fresh."""
        old, named, owns = self._keeper.plan, self._groups.named(), self._ranks.owns
        present, params = set(present), [p for _, p, _ in named]
        plan = self._make_plan(
            (p, config)
            for _, p, config in named
            if p.requires_grad or p in present or blocks_of(self.state.get(p, {}))
        )
        # All ranks create F's state of the same parameters.
        started = [p for p in params if p in plan.locations or (p.requires_grad and not owns(p))]
        self._past_counts.update(fallback_counts(old))
        self._keeper.bind(plan, started, self.state, self.base.state)
        if old is None:
            warn_if_few(named, self._statistics.route, self.summary)
        return plan

    def _make_plan(self, params: Iterable[tuple[Tensor, Config]]) -> StatePlan:
        route = partial(self._ranks.route, self._statistics.route)
        return StatePlan(params, self.algorithm, self.config, route, self._ranks.exchange)

    @property
    def _ranks(self) -> Ranks:
        """The other ranks, determined once."""
        if self._known_ranks is None:
            self._known_ranks = self._find_ranks()
        return self._known_ranks

    def _find_ranks(self) -> Ranks:
        named, route = self._groups.named(), self._statistics.route
        return find_ranks(named, self.config, self._process_group, route)

    def _expect_statistics(self) -> None:
        """Tell the statistics which parameters are due for an update at the next step."""
        if self._statistics.collects:
            given = self._groups.config_of, self._statistics.route, self.state
            updates = expected_updates(self.param_groups, *given, self._keeper.turns_of)
            self._statistics.expect(updates)

    # ---------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain tensors by parameter and block, and F's state under ``"base"``.

        For sharded parameters, it holds the blocks that this rank owns, as
        ``torch.distributed.checkpoint`` expects. ``kronbit.consolidate_state_dict`` collects all.
        """
        if self.config.shard_state:
            self._ranks.refuse_partial_state()
        return self._local_state_dict()

    def _local_state_dict(self) -> dict[str, Any]:
        """Return the state that this rank holds."""
        self._groups.complete()
        self._keeper.base_link.join(self.state, self.base.state)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint bit for bit, converting it where bits or method differ.

        Numbers of the param groups (``lr``, ``beta``, ``damping``, intervals, ...) come from the
        checkpoint, as in every torch optimizer; the storage format is that of this optimizer.
        A checkpoint of F alone loads as well: the second-order state then starts fresh.

        Raises:
            ValueError: If the checkpoint does not fit. The message names the key, and the
                optimizer is unchanged.
        """
        state_dict = self._state_dict_to_load(state_dict)
        configs = [self._groups.config_of(group) for group in self.param_groups]
        checkpoint = read(state_dict, self.param_groups, configs, self._statistics.name)
        checkpoint = checkpoint.owned_by(self._ranks.owns)
        base = BaseLoader(self.base, checkpoint)
        base.check()
        self._groups.adopt()  # Lightning's finetuning replaces the groups
        plan = self._make_plan(checkpoint.parameters(self.param_groups, self.config))
        with self._ranks.together():
            fill(plan, checkpoint.entries)
        base.load()  # the first change
        self.state = defaultdict(dict, checkpoint.new_state())
        self._start_unplanned()
        if checkpoint.entries:
            entries = checkpoint.entries.items()
            unknown = [p for p, entry in entries if entry.product_bits is None]
            self._keeper.bind(plan, checkpoint.entries, self.state, self.base.state, unknown)
        warn_after_loading(checkpoint.entries, self._groups.named(), self._statistics.route)
        self._expect_statistics()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("defaults", "state", "base", "config", "_statistics")
        # Process groups cannot be copied: a copy works alone.
        group = {"_process_group": None if self._process_group is None else False}
        return {name: getattr(self, name) for name in kept} | group

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known_ranks = None
        self._groups = ParamGroups(self.base, self.config, self._statistics)
        self._start_unplanned()
        self._expect_statistics()

    # -------------------------------------------------------------------------------- reporting

    def memory(self) -> dict[str, int]:
        """Return the bytes held now, by kind: ``{"statistics", "roots", "base", "total"}``."""
        return account(self.state, self.base.state)

    def summary(self) -> str:
        """Return a table of parameters: blocks, method, bits, bytes, or why they are left to F."""
        named, route = self._groups.named(), self._statistics.route
        return summary(type(self).__name__, named, route, self.base, self.config)

    def diagnostics(self) -> dict[str, Any]:
        """Return counters of fallbacks, and figures per group of blocks. Waits for the device.

        Counting starts at construction or at the last ``load_state_dict``.
        """
        counts = self._statistics.counts(), self._past_counts
        return diagnostics(self._keeper.plan, self._guards, self._known_ranks, *counts)
