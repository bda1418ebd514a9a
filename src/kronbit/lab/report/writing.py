"""Writes the report of a comparison: figures, and one HTML file that contains them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kronbit.lab.errors import LabError
from kronbit.lab.files import make_folder, write_bytes
from kronbit.lab.report import numbers, outcomes
from kronbit.lab.report.figures import PARTS, draw_figures, peak_kind
from kronbit.lab.report.outcomes import Column, Outcome
from kronbit.lab.report.runs import Run, by_recipe

_RESULTS = (
    Column("seed", "seed", numbers.count_text),
    Column("steps", "steps", numbers.count_text),
    Column("train_loss", "training\nloss", numbers.loss_text),
    Column("loss", "validation\nloss", numbers.loss_text),
    Column("best_loss", "best\nloss", numbers.loss_text),
    Column("accuracy", "accuracy", numbers.percent_text),
    Column("best_accuracy", "best\naccuracy", numbers.percent_text),
    Column("errors.nre", "error of\nroots", numbers.loss_text),
    Column("errors.angle", "angle\nof roots", numbers.degrees_text),
    Column("seconds", "seconds", numbers.time_text),
    Column("step_ms.median", "ms a step,\nmedian", numbers.time_text),
    Column("step_ms.mean", "mean", numbers.time_text),
    Column("step_ms.p5", "5 %", numbers.time_text),
    Column("step_ms.p95", "95 %", numbers.time_text),
)
_MEMORY = (
    Column("seed", "seed", numbers.count_text),
    *(Column(f"memory.{k}", name.replace(" ", "\n"), numbers.bytes_text) for k, name, _ in PARTS),
    Column("memory.peak", "peak", numbers.bytes_text),
)

# A number in large print, its name, and the number it is compared with.
_Tile = tuple[str, str, str]


def write_report(runs: Sequence[Run], folder: Path, title: str, command: str) -> Path:
    """Write the figures and ``report.html``, which contains them; return the path of the page.

    Raises:
        LabError: If there are no runs, or the folder is not writable.
    """
    if not runs:
        raise LabError("no runs to report on: name the folder of a run or a comparison")
    make_folder(folder)
    sections = [_section(recipe, recipe_runs) for recipe, recipe_runs in by_recipe(runs).items()]
    files: dict[str, bytes] = {}
    for section in sections:
        name = re.sub(r"[^\w.-]+", "_", section["recipe"]).strip("._") or "recipe"
        prefix = f"{name}-" if len(sections) > 1 else ""
        files |= {f"{prefix}{drawing.name}.png": drawing.png for drawing in section["drawings"]}
    page = _render(title=title, command=command, origin=_origin(runs), sections=sections)
    files["report.html"] = page.encode()  # written last, when its figures exist
    for name, content in files.items():
        write_bytes(folder / name, content)
    return folder / "report.html"


def _render(**content: Any) -> str:
    """Render the template. All text is escaped, and a missing variable raises an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(content)


def _origin(runs: Sequence[Run]) -> list[str]:
    """Return the number of runs, their dates, hardware and versions as text."""
    days = sorted(run.started[:10] for run in runs if run.started)
    versions = set(filter(None, map(_versions, runs)))
    parts = [
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}",
        " to ".join(dict.fromkeys(days[:1] + days[-1:])),
        *_distinct_hardware(runs),
        "several versions, see the runs" if len(versions) > 1 else "".join(versions),
    ]
    return [part for part in parts if part]


def _section(recipe: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the template variables of a recipe's section."""
    compared = outcomes.outcomes(runs)
    heading, tiles = _tiles(compared)
    kind = peak_kind(compared)
    of_peak = f"; peak: {kind}" if kind else ""
    return {
        "recipe": recipe,
        "abouts": dict.fromkeys(str(about) for run in runs if (about := run.settings.get("about"))),
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
    base = outcomes.find(compared, "base")
    others = [outcome for outcome in compared if outcome.variant != "base"]
    chosen = outcomes.find(compared, "shampoo-4") or (others[0] if len(others) == 1 else None)
    if base is None or chosen is None:
        return "", []

    def pair(name: str, key: str, write: numbers.Write, unit: str = "") -> list[_Tile]:
        number, of_base = chosen.number(key), base.number(key)
        if number is None or of_base is None:
            return []
        return [(write(number) + unit, name, f"{base.label}: {write(of_base)}{unit}")]

    tiles = [
        *pair("validation loss", "loss", numbers.loss_text),
        *pair("accuracy", "accuracy", numbers.percent_text),
    ]
    if chosen.steps_to_base is not None and chosen.reached_base:
        share = f"{100 * chosen.steps_to_base:.0f} %"
        tiles.append((share, f"of {base.label}'s steps", f"to reach {base.label}'s last loss"))
    elif chosen.steps_to_base is not None:
        tiles.append(("not reached", f"{base.label}'s last loss", "in all its steps"))
    state, of_32, full = chosen.number("state"), chosen.number("of_32"), ""
    if of_32:
        full = f"32-bit: {numbers.bytes_text(chosen.state_32)}, {1 / of_32:.1f} times as much"
    if state:
        tiles.append((numbers.bytes_text(state), "second-order state", full))
    tiles += pair("per step, mean", "step_ms.mean", numbers.time_text, " ms")
    return f"{chosen.full_label} compared with {base.full_label}", tiles


def _comparison(compared: Sequence[Outcome]) -> dict[str, Any]:
    """Return the template variables of the table that compares the optimizers."""
    columns, over = outcomes.shown_columns(compared), ""
    if any(len(outcome.counted) > 1 for outcome in compared):
        columns = [Column("runs", "runs", numbers.count_text), *columns]
        over = ": mean over its runs, ± the largest distance of a run from the mean"
    best = {}
    for key, choose in (("loss", min), ("accuracy", max)):
        known = [value for row in compared if (value := row.number(key)) is not None]
        if len(compared) > 1:
            best[key] = choose(filter(math.isfinite, known), default=None)
    return {
        "caption": f"Result of each optimizer{over}. {outcomes.explain_steps(compared)}".strip(),
        "columns": columns,
        "rows": [(outcome.variant, outcome) for outcome in compared],
        "best": best,
    }


def _of_runs(caption: str, runs: Sequence[Run], columns: Sequence[Column]) -> dict[str, Any]:
    """Return the template variables of a table of runs, with the columns that have a number."""
    return {
        "caption": caption,
        "columns": [c for c in columns if any(run.number(c.key) is not None for run in runs)],
        "rows": [(run.folder.name, run) for run in runs],
        "best": {},
    }


def _details(run: Run) -> dict[str, Any]:
    """Return the template variables of a run, with its diagnostics and settings as text."""
    counters = [
        f"{key}: {numbers.count_text(count)}"
        for key, count in (run.summary.get("diagnostics") or {}).items()
        if isinstance(count, int | float) and count
    ]
    return {
        "run": run,
        "versions": _versions(run),
        "diagnostics": ", ".join(counters) or "all counters are zero" * run.finished,
        "settings": {name: _as_text(value) for name, value in outcomes.flat(run.settings).items()},
    }


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)


def _distinct_hardware(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.hardware for run in runs))
