"""The summary of a finished run."""

from __future__ import annotations

import statistics
from typing import Any

from kronbit.lab.training.loop import Training
from kronbit.optimizer import SecondOrder
from kronbit.reporting.memory import held_bytes


def summarise(training: Training) -> dict[str, Any]:
    """Return the content of ``summary.json``, except for the name and origin of the run."""
    last, times = training.last, sorted(training.step_ms)
    evaluated, errors = last.get("eval", {}), last.get("errors")
    counters: dict[str, Any] = getattr(training.optimizer, "diagnostics", dict)()
    return {
        "recipe": training.recipe.name,
        "seed": training.recipe.seed,
        "steps": training.step,
        "finished": training.step == training.steps,
        "train_loss": last["train"]["loss"],
        **{name: evaluated.get(name) for name in ("loss", "accuracy")},
        **{f"best_{name}": training.best.get(name) for name in ("loss", "accuracy")},
        "seconds": training.seconds,
        "step_ms": {
            "median": statistics.median(times),
            "mean": round(statistics.fmean(times), 4),
            "p5": times[round(0.05 * (len(times) - 1))],
            "p95": times[round(0.95 * (len(times) - 1))],
        },
        "memory": _memory(training),
        "diagnostics": {name: value for name, value in counters.items() if type(value) is int},
        "errors": None if errors is None else {name: errors[name] for name in ("nre", "angle")},
    }


def _memory(training: Training) -> dict[str, Any]:
    params = list(training.model.parameters())
    optimizer = training.optimizer
    if isinstance(optimizer, SecondOrder):
        held = optimizer.memory()
    else:
        state = held_bytes(optimizer.state)
        base = held_bytes(getattr(optimizer, "base", optimizer).state)
        held = {"base": base, "statistics": max(0, state - base), "roots": 0}
    return {
        "peak": training.peak.bytes,
        "peak_is": training.peak.kind,
        "parameters": held_bytes(params),
        "gradients": held_bytes([p for p in params if p.requires_grad]),
        **{name: held[name] for name in ("base", "statistics", "roots")},
    }
