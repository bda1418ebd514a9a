"""Writing of the report of a comparison: figures, and one HTML file that contains them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kronbit.lab.errors import LabError
from kronbit.lab.report.cost_figures import peak_kind
from kronbit.lab.report.figures import draw_figures
from kronbit.lab.report.numbers import (
    Write,
    bytes_text,
    count_text,
    degrees_text,
    loss_text,
    percent_text,
    time_text,
)
from kronbit.lab.report.outcomes import (
    COLUMNS,
    Column,
    Outcome,
    explain_steps,
    find,
    flat,
    outcomes,
    shown_columns,
)
from kronbit.lab.report.page import NumberTable, render_page
from kronbit.lab.report.runs import Run, by_recipe
from kronbit.lab.training.files import make_folder, write_bytes


def _column(title: str, write: Write, *path: str) -> Column[Run]:
    def value(run: Run) -> float | None:
        return run.number(*path)

    return Column(".".join(path), title, value, lambda run: write(value(run)))


_SEED = _column("seed", count_text, "seed")
_RESULTS = (
    _SEED,
    _column("steps", count_text, "steps"),
    _column("training\nloss", loss_text, "train_loss"),
    _column("validation\nloss", loss_text, "loss"),
    _column("best\nloss", loss_text, "best_loss"),
    _column("accuracy", percent_text, "accuracy"),
    _column("best\naccuracy", percent_text, "best_accuracy"),
    _column("error of\nroots", loss_text, "errors", "nre"),
    _column("angle\nof roots", degrees_text, "errors", "angle"),
    _column("seconds", time_text, "seconds"),
    _column("ms a step,\nmedian", time_text, "step_ms", "median"),
    _column("mean", time_text, "step_ms", "mean"),
    _column("5 %", time_text, "step_ms", "p5"),
    _column("95 %", time_text, "step_ms", "p95"),
)
_MEMORY = (
    _SEED,
    _column("parameters", bytes_text, "memory", "parameters"),
    _column("gradients", bytes_text, "memory", "gradients"),
    _column("base's\nstate", bytes_text, "memory", "base"),
    _column("statistics", bytes_text, "memory", "statistics"),
    _column("inverse\nroots", bytes_text, "memory", "roots"),
    _column("peak", bytes_text, "memory", "peak"),
)
_RUNS: Column[Outcome] = Column(
    "runs", "runs", lambda outcome: len(outcome.counted), lambda outcome: str(len(outcome.counted))
)

# A number in large print, its name, and the number it is compared with.
_Tile = tuple[str, str, str]


def write_report(runs: Sequence[Run], folder: Path, title: str, command: str) -> Path:
    """Write the figures and ``report.html``, which contains them.

    Args:
        runs: Runs of one or more comparisons. Each recipe gets a section.
        folder: Output folder, created if it does not exist.
        title: Title of the page.
        command: Command shown at the top of the page.

    Returns:
        Path of the page.

    Raises:
        LabError: If there are no runs, or the folder is not writable.
    """
    if not runs:
        raise LabError("no runs to report on: name the folder of a run or a comparison")
    sections = [_section(recipe, members) for recipe, members in by_recipe(runs).items()]
    files: dict[str, bytes] = {}
    for section in sections:
        prefix = f"{_file_name(section['recipe'])}-" if len(sections) > 1 else ""
        files |= {f"{prefix}{drawing.name}.png": drawing.png for drawing in section["drawings"]}
    page = render_page(title=title, command=command, origin=_origin(runs), sections=sections)
    files["report.html"] = page.encode()  # written last, when its figures exist
    make_folder(folder)
    for name, content in files.items():
        write_bytes(folder / name, content)
    return folder / "report.html"


def _file_name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "_", recipe).strip("._") or "recipe"


def _origin(runs: Sequence[Run]) -> list[str]:
    """Return the number of runs, their dates, hardware and versions as text."""
    days = sorted({run.started[:10] for run in runs if run.started})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    versions = list(dict.fromkeys(filter(None, map(_versions, runs))))
    parts = [
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}",
        when,
        *_distinct_hardware(runs),
        "several versions, see the runs" if len(versions) > 1 else "".join(versions),
    ]
    return [part for part in parts if part]


def _section(recipe: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the template variables of a recipe's section."""
    compared = outcomes(runs)
    heading, tiles = _tiles(compared)
    kind = peak_kind(compared)
    of_peak = f"; peak: {kind}" if kind else ""
    abouts = dict.fromkeys(str(run.settings.get("about") or "") for run in runs)
    return {
        "recipe": recipe,
        "abouts": [about for about in abouts if about],
        "hardware": _distinct_hardware(runs),
        "tiles_heading": heading,
        "tiles": tiles,
        "comparison": _comparison(compared),
        "drawings": draw_figures(compared),
        "results": _of_runs("Results of every run, from its summary.json.", runs, _RESULTS),
        "memory": _of_runs(f"Memory of every run{of_peak}.", runs, _MEMORY),
        "runs": [_details(run) for run in runs],
    }


def _tiles(compared: Sequence[Outcome]) -> tuple[str, list[_Tile]]:
    """Return the comparison of one variant with the base: its heading and its tiles.

    The variant is ``shampoo-4`` or the only one beside the base; without one there are no tiles.
    """
    base = find(compared, "base")
    others = [outcome for outcome in compared if outcome.variant != "base"]
    chosen = find(compared, "shampoo-4") or (others[0] if len(others) == 1 else None)
    if base is None or chosen is None:
        return "", []

    def pair(name: str, write: Write, *path: str, unit: str = "") -> list[_Tile]:
        number, of_base = chosen.spread(*path), base.spread(*path)
        if number is None or of_base is None:
            return []
        return [(write(number.mean) + unit, name, f"{base.label}: {write(of_base.mean)}{unit}")]

    tiles = [
        *pair("validation loss", loss_text, "loss"),
        *pair("accuracy", percent_text, "accuracy"),
    ]
    if chosen.steps_to_base is not None and chosen.reached_base:
        share = f"{100 * chosen.steps_to_base:.0f} %"
        tiles.append((share, f"of {base.label}'s steps", f"until {base.label}'s last loss"))
    elif chosen.steps_to_base is not None:
        tiles.append(("not reached", f"{base.label}'s last loss", "in all its steps"))
    if chosen.state is not None and chosen.state.mean:
        full = ""
        if chosen.of_32:
            full = f"32-bit: {bytes_text(chosen.state_32)}, {1 / chosen.of_32:.1f} times as much"
        tiles.append((bytes_text(chosen.state.mean), "second-order state", full))
    tiles += pair("per step, mean", time_text, "step_ms", "mean", unit=" ms")
    return f"{chosen.full_label} compared with {base.full_label}", tiles


def _comparison(compared: Sequence[Outcome]) -> NumberTable:
    """Return the table that compares the optimizers."""
    columns = shown_columns(COLUMNS, compared)
    best: dict[str, float] = {}
    for column in columns if len(compared) > 1 else ():
        values = [value for value in map(column.value, compared) if value is not None]
        finite = list(filter(math.isfinite, values))
        if finite and column.key in ("loss", "accuracy"):
            best[column.key] = min(finite) if column.key == "loss" else max(finite)
    over = ""
    if any(len(outcome.counted) > 1 for outcome in compared):
        columns = [_RUNS, *columns]
        over = ": mean over its runs, ± the largest distance of a run from the mean"
    caption = f"Result of each optimizer{over}. {explain_steps(compared)}".strip()
    return NumberTable(caption, columns, [(row.variant, row) for row in compared], best)


def _of_runs(caption: str, runs: Sequence[Run], columns: Sequence[Column[Run]]) -> NumberTable:
    """Return a table with one row per run and the columns in which some run has a number."""
    shown = [column for column in columns if any(column.value(run) is not None for run in runs)]
    return NumberTable(caption, shown, [(run.folder.name, run) for run in runs])


def _details(run: Run) -> dict[str, Any]:
    """Return the template variables of a run: command, origin, diagnostics and settings."""
    counters = [
        f"{key}: {count_text(count)}"
        for key, count in (run.summary.get("diagnostics") or {}).items()
        if isinstance(count, int | float) and count
    ]
    return {
        "heading": f"{run.full_label}, seed {run.seed}",
        "command": run.command,
        "facts": {
            "seed": str(run.seed),
            "started": run.started,
            "folder": run.folder.name,
            "hardware": run.hardware,
            "versions": _versions(run),
            "diagnostics": ", ".join(counters) or "all counters are zero" * run.finished,
        },
        "settings": {name: _as_text(value) for name, value in flat(run.settings).items()},
    }


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)


def _distinct_hardware(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.hardware for run in runs))
