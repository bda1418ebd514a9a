"""The training loop, which can be stopped at any moment.

The host does not wait for the device on ordinary steps: losses are read every ``log_every`` steps.
All random numbers are functions of seed, step and rank, so a resumed run equals an uninterrupted
one bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronbit.lab import checkpoints
from kronbit.lab.data import Setting, open_data
from kronbit.lab.errors import LabError, import_optional, lab_error
from kronbit.lab.files import append_line, shorten
from kronbit.lab.models import build
from kronbit.lab.optimizers import make_optimizer
from kronbit.lab.precision import DTYPES
from kronbit.lab.randomness import seed_of
from kronbit.lab.recipe import Recipe
from kronbit.lab.schedules import factor, warmup_steps
from kronbit.lab.training import passes
from kronbit.lab.training.measures import PeakMemory, StepTimer, allocated_earlier
from kronbit.lab.training.shadow import Shadow
from kronbit.lab.training.terminal import Terminal
from kronbit.lab.training.world import Votes, World
from kronbit.reporting.memory import held_bytes

_PATIENCE = 2  # lines of non-finite loss before a run is abandoned
_RECALIBRATED = 50  # batches for the statistics of batch norm in evaluation
_KEPT = ("seconds", "last", "best", "step_ms")  # attributes in a checkpoint


class Interrupted(Exception):  # noqa: N818  # not an error
    """The user has stopped the run; a checkpoint was written."""


class Training:
    """One run of a recipe, whose files are in ``folder``."""

    def __init__(self, recipe: Recipe, folder: Path, world: World) -> None:
        self.recipe, self.folder, self.world = recipe, folder, world
        self._metrics = folder / "metrics.jsonl"
        world.refuse_conflicts(recipe)
        device = world.device
        earlier = allocated_earlier(device)
        order = recipe.batch, recipe.seed, device, world.rank, world.ranks, recipe.holdout
        self.data = open_data(recipe.data, Setting(world.data, *order))
        self.per_epoch = max(1, self.data.examples // recipe.batch)
        self.steps = recipe.steps or max(1, round((recipe.epochs or 0) * self.per_epoch))
        self.warmup = warmup_steps(recipe, self.steps, self.per_epoch)

        torch.manual_seed(recipe.seed)
        self.model = self._build_model(device)
        smoothing = float(recipe.data.get("smoothing", 0.0))
        self.objective = passes.Objective(self.data.classifies, recipe.amp, smoothing)
        if device.type == "cpu" and world.parallel == "none":
            passes.rehearse(self.model, self.objective, *self.data.batch(0))
        self.peak = PeakMemory(device, held_bytes(list(self.model.parameters())), earlier)
        runner = world.distribute(self.model)
        # A scaler that is not enabled passes everything through.
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
        self.optimizer = make_optimizer(recipe, self.model, self.warmup, self.scaler)
        self._runner: nn.Module = torch.compile(runner) if world.compile else runner  # type: ignore[assignment]
        self._passes: passes.Eager | passes.Captured | None = None
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        self.shadow = Shadow(self.optimizer, names, recipe.watched_blocks, self._aside)

        self.step = 0
        self.seconds = 0.0
        self.last: dict[str, Mapping[str, Any]] = {}  # the last line of each kind
        self.best: dict[str, float] = {}
        self.step_ms: list[float] = []
        self._losses: list[Tensor] = []
        self._timer = StepTimer(device)
        self._votes = Votes(world)
        self._without_loss = 0
        self._board: Any = None

    def _build_model(self, device: torch.device) -> nn.Module:
        options, needed = self.recipe.model, self.data.outputs
        model = build(**options).to(device, DTYPES[self.recipe.dtype])
        if self.recipe.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for option in ("classes", "vocab_size"):
            if options.get(option, needed) < needed:
                raise LabError(
                    f"the data has {needed} classes or tokens, the model only {options[option]}: "
                    f"--set model.{option}={needed}"
                )
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        length = self.recipe.data.get("length")
        if longest is not None and length is not None and length > longest:
            raise LabError(f"data.length={length} exceeds the {longest} positions of the model")
        return model

    def run(self, terminal: Terminal, label: str, resume: bool) -> None:
        """Train to the end, from the start or from the last checkpoint.

        Raises:
            Interrupted: If the user wants to stop.
        """
        size = self._load() if resume else 0
        if self.world.first:
            shorten(self._metrics, size)
            if self.world.tensorboard:
                self._board = _tensorboard(self.folder, self.step)
        terminal.begin(label, self.step, self.steps)
        recipe = self.recipe
        eval_every = recipe.eval_every or max(1, math.ceil(self.steps / 20))
        save_every = recipe.checkpoint_every or self.steps
        self._switch("train")
        while self.step < self.steps:
            if not self._losses:  # at the start, and after losses were written
                self.peak.restart()
                self._timer.restart()
                self._since = time.perf_counter()
            self._take_step()
            terminal.step(self.step)
            last = self.step == self.steps
            stop = self._votes.any_rank(terminal.interrupted)
            save = last or stop or self.step % save_every == 0
            evaluate = last or self.step % eval_every == 0
            if save or evaluate or self.step % recipe.log_every == 0:
                self._flush(terminal)
                if self._without_loss >= _PATIENCE:
                    terminal.message(f"{label}: the loss is not finite at step {self.step}")
                    break
                if evaluate:
                    self._evaluate(terminal)
                if save:
                    self._save()
                if stop and not last:
                    raise Interrupted
        self.world.wait()

    def _take_step(self) -> None:
        """Take one step of the optimizer, without waiting for the device."""
        recipe, step = self.recipe, self.step
        lr = recipe.lr * factor(recipe.schedule, step, self.steps, self.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        x, y = self.data.batch(step)
        if recipe.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        if self._passes is None:
            self._passes = self._make_passes(x, y)
        torch.manual_seed(seed_of("network", recipe.seed, step, self.world.rank))  # e.g. drop path
        self._losses.append(self._passes(x, y))
        self.scaler.unscale_(self.optimizer)
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.shadow.before_step()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self._timer.mark()
        errors = self.shadow.after_step()
        if errors is not None:  # written before the losses of the same step
            self._add("errors", errors)

    def _make_passes(self, x: Tensor, y: Tensor) -> passes.Eager | passes.Captured:
        repeatable = passes.Repeatable(self.world.device, self.recipe.deterministic)
        if self.world.graph:
            captured = passes.Captured(self._runner, self.objective, x, y, repeatable)
            self.peak.add_beside(captured.freed_bytes)
            return captured
        share = self.recipe.micro_batch
        return passes.Eager(
            self._runner, self.objective, self.optimizer, share, self.scaler, repeatable
        )

    def _flush(self, terminal: Terminal) -> None:
        """Write the mean loss since the last call. Waits for the device."""
        mean = torch.stack(self._losses).double().mean()
        loss = float(self.world.sum(mean)) / self.world.ranks
        passed = time.perf_counter() - self._since
        self.seconds += passed
        self.peak.note()
        self._without_loss = 0 if math.isfinite(loss) else self._without_loss + 1
        lr = self.optimizer.param_groups[0]["lr"]
        times = self._timer.gather()
        self.step_ms += times
        self._add("train", {"loss": loss, "lr": lr, "step_ms": times})
        terminal.figures(loss, lr, len(self._losses) / max(passed, 1e-9), self.peak.now())
        self._losses.clear()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Exclude the body from the measured time and memory of the run."""
        synchronize = torch.get_device_module(self.world.device).synchronize
        synchronize(self.world.device)
        self.peak.note()
        start = time.perf_counter()
        yield
        synchronize(self.world.device)
        passed = time.perf_counter() - start
        self._timer.skip(passed)
        self._since += passed
        self.peak.restart()

    def _evaluate(self, terminal: Terminal) -> None:
        total = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        with self.evaluation_mode():
            for x, y in islice(self.data.held_out(), self.recipe.eval_batches):
                total += self.objective.judge(self.model, x, y)
        loss, right, count = self.world.sum(total).tolist()
        figures = {"loss": loss / count}
        if self.data.classifies:
            figures["accuracy"] = right / count
            self.best["accuracy"] = max(self.best.get("accuracy", 0.0), figures["accuracy"])
        self.best["loss"] = min(self.best.get("loss", math.inf), figures["loss"])
        self._add("eval", figures)
        terminal.evaluation(self.step, figures)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Switch the network and F to evaluation, for which a schedule-free F has other weights.

        Statistics of batch norm are recomputed for these weights, and restored afterwards.
        """
        self._switch("eval")
        norms = [part for part in self.model.modules() if isinstance(part, nn.BatchNorm2d)]
        with passes.unchanged_buffers(self.model):
            if norms and self.recipe.schedule == "schedule-free":
                for norm in norms:
                    norm.train()
                with torch.no_grad():
                    for step in range(self.step, self.step + _RECALIBRATED):
                        self.objective.outputs(self.model, self.data.batch(step)[0])
                self.model.eval()
            yield
            self._switch("train")

    def _switch(self, mode: str) -> None:
        """Call ``train`` or ``eval`` of the network, and of an optimizer that has them."""
        getattr(self.model, mode)()
        getattr(self.optimizer, mode, lambda: None)()

    def _add(self, kind: str, figures: Mapping[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``."""
        epoch, seconds = round(self.step / self.per_epoch, 4), round(self.seconds, 4)
        line = {"kind": kind, "step": self.step, "epoch": epoch, "seconds": seconds, **figures}
        self.last[kind] = line
        if self.world.first:
            append_line(self._metrics, line)
        if self._board is not None:
            for name, value in figures.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, self.step)
            self._board.flush()

    def _save(self) -> None:
        state = self.world.whole_state(self.model, self.optimizer)  # all ranks together
        if self.world.first:
            content = {
                **state,
                "scaler": self.scaler.state_dict(),
                "shadow": self.shadow.state_dict(),
                "metrics_size": self._metrics.stat().st_size,
                **{name: getattr(self, name) for name in _KEPT},
                "peak": self.peak.bytes,
            }
            checkpoints.save(self.folder, self.step, content, self.recipe.keep)
        self.world.wait()

    def _load(self) -> int:
        """Load the last checkpoint; return the size of the metrics file at that time."""
        state = checkpoints.load_last(self.folder)
        problem = f"the checkpoint in {self.folder} does not fit"
        with lab_error(problem, KeyError, RuntimeError, ValueError):
            self.world.load_whole_state(self.model, self.optimizer, state)
            self.scaler.load_state_dict(state["scaler"])
            if state["shadow"].keys() == self.shadow.state_dict().keys():
                self.shadow.load_state_dict(state["shadow"])
            else:  # with other ranks, other blocks were watched: watching cannot start midway
                self.shadow.watches = []
        for name in ("step", *_KEPT):
            setattr(self, name, state[name])
        self.peak.bytes = state["peak"]
        return int(state["metrics_size"])


def _tensorboard(folder: Path, step: int) -> Any:
    tensorboard = import_optional("torch.utils.tensorboard", "tensorboard", "--tensorboard")
    # Steps after the checkpoint are written again.
    return tensorboard.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
