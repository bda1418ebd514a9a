"""The report of a comparison: figures, and a page that explains itself and needs no other file."""

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
from kronbit.lab.report.outcomes import Outcome, explain_steps, find, flat, outcomes, shown_columns
from kronbit.lab.report.page import Cell, Row, Table, render_page
from kronbit.lab.report.runs import Run, by_recipe
from kronbit.lab.training.files import make_folder, write_bytes

# Every number of a summary: where it is, its heading, and how it is written.
_Number = tuple[tuple[str, ...], str, Write]
_SEED: _Number = (("seed",), "seed", count_text)
_RESULTS: tuple[_Number, ...] = (
    _SEED,
    (("steps",), "steps", count_text),
    (("train_loss",), "training\nloss", loss_text),
    (("loss",), "validation\nloss", loss_text),
    (("best_loss",), "best\nloss", loss_text),
    (("accuracy",), "accuracy", percent_text),
    (("best_accuracy",), "best\naccuracy", percent_text),
    (("errors", "nre"), "error of\nroots", loss_text),
    (("errors", "angle"), "angle\nof roots", degrees_text),
    (("seconds",), "seconds", time_text),
    (("step_ms", "median"), "ms a step,\nmedian", time_text),
    (("step_ms", "mean"), "mean", time_text),
    (("step_ms", "p5"), "5 %", time_text),
    (("step_ms", "p95"), "95 %", time_text),
)
_MEMORY: tuple[_Number, ...] = (
    _SEED,
    (("memory", "parameters"), "parameters", bytes_text),
    (("memory", "gradients"), "gradients", bytes_text),
    (("memory", "base"), "base's\nstate", bytes_text),
    (("memory", "statistics"), "statistics", bytes_text),
    (("memory", "roots"), "inverse\nroots", bytes_text),
    (("memory", "peak"), "peak", bytes_text),
)

# A number in large print: its text, what it is, and what it is beside.
_Tile = tuple[str, str, str]


def write_report(runs: Sequence[Run], folder: Path, title: str, command: str) -> Path:
    """Write the figures and ``report.html``, which contains them.

    Args:
        runs: Of one comparison or of several; each recipe gets a section.
        folder: Where to; it is made if it does not exist.
        title: Of the page.
        command: What was typed to get it.

    Returns:
        The page's path.

    Raises:
        LabError: There are no runs, or the folder cannot be written to.
    """
    if not runs:
        raise LabError("there are no runs to report on: name the folder of a run or a comparison")
    sections = [_section(recipe, own) for recipe, own in by_recipe(runs).items()]
    files: dict[str, bytes] = {}
    for section in sections:
        before = f"{_file_name(section['recipe'])}-" if len(sections) > 1 else ""
        files |= {f"{before}{drawing.name}.png": drawing.png for drawing in section["drawings"]}
    page = render_page(title=title, command=command, origin=_origin(runs), sections=sections)
    files["report.html"] = page.encode()  # last: whoever sees it finds its figures
    make_folder(folder)
    for name, content in files.items():
        write_bytes(folder / name, content)
    return folder / "report.html"


def _file_name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "_", recipe).strip("._") or "recipe"


def _origin(runs: Sequence[Run]) -> list[str]:
    """How many runs there are, and when, where and with what they ran."""
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
    """A recipe's part of the page."""
    found = outcomes(runs)
    heading, tiles = _tiles(found)
    what = peak_kind(found)
    of_peak = f"; the peak is what was {what}" if what else ""
    abouts = dict.fromkeys(str(run.settings.get("about") or "") for run in runs)
    return {
        "recipe": recipe,
        "abouts": [about for about in abouts if about],
        "hardware": _distinct_hardware(runs),
        "tiles_heading": heading,
        "tiles": tiles,
        "comparison": _comparison(found),
        "drawings": draw_figures(found),
        "results": _numbers("Results of every run, as its summary.json says.", runs, _RESULTS),
        "memory": _numbers(f"Memory of every run{of_peak}.", runs, _MEMORY),
        "runs": [_details(run) for run in runs],
    }


def _tiles(found: Sequence[Outcome]) -> tuple[str, list[_Tile]]:
    """What 4 bits come to beside the base, in large print; nothing if it is unclear what is."""
    base = find(found, "base")
    others = [own for own in found if own.variant != "base"]
    own = find(found, "shampoo-4") or (others[0] if len(others) == 1 else None)
    if base is None or own is None:
        return "", []

    def both(what: str, write: Write, *path: str, unit: str = "") -> list[_Tile]:
        mine, its = own.spread(*path), base.spread(*path)
        if mine is None or its is None:
            return []
        return [(write(mine.mean) + unit, what, f"{base.label}: {write(its.mean)}{unit}")]

    tiles = [
        *both("validation loss", loss_text, "loss"),
        *both("accuracy", percent_text, "accuracy"),
    ]
    if own.steps_to_base is not None and own.reached_base:
        share = f"{100 * own.steps_to_base:.0f} %"
        tiles.append((share, f"of {base.label}'s steps", f"until {base.label}'s last loss"))
    elif own.steps_to_base is not None:
        tiles.append(("not reached", f"{base.label}'s last loss", "in all its steps"))
    if own.state is not None and own.state.mean:
        beside = ""
        if own.of_32:
            beside = f"32-bit: {bytes_text(own.state_32)}, {1 / own.of_32:.1f} times as much"
        tiles.append((bytes_text(own.state.mean), "second-order state", beside))
    tiles += both("per step, mean", time_text, "step_ms", "mean", unit=" ms")
    return f"{own.full_label} beside {base.full_label}", tiles


def _comparison(found: Sequence[Outcome]) -> Table:
    """The table that a comparison ends with."""
    columns = shown_columns(found)
    several = any(len(own.counted) > 1 for own in found)
    best = {}
    for key, choose in (("loss", min), ("accuracy", max)):
        means = [spread.mean for own in found if (spread := own.spread(key)) is not None]
        best[key] = choose((mean for mean in means if math.isfinite(mean)), default=None)
    rows = []
    for own in found:
        cells = [Cell("runs", len(own.counted), str(len(own.counted)))] if several else []
        for column in columns:
            value = column.value(own)
            is_best = value is not None and len(found) > 1 and value == best.get(column.key)
            cells.append(Cell(column.key, value, column.text(own), is_best))
        rows.append(Row(own.variant, own.full_label, cells))
    over = ": means over its runs, ± the largest distance of a run from the mean" * several
    caption = f"What each optimizer came to{over}. {explain_steps(found)}"
    headings = ["optimizer", *(["runs"] if several else []), *(column.title for column in columns)]
    return Table(caption.strip(), headings, rows)


def _numbers(caption: str, runs: Sequence[Run], wanted: Sequence[_Number]) -> Table:
    """A table of numbers of the summaries, those that some run has."""
    shown = [
        (path, heading, write)
        for path, heading, write in wanted
        if any(run.number(*path) is not None for run in runs)
    ]
    rows = []
    for run in runs:
        values = [(path, run.number(*path), write) for path, _, write in shown]
        cells = [Cell(".".join(path), value, write(value)) for path, value, write in values]
        rows.append(Row(run.folder.name, run.full_label, cells))
    return Table(caption, ["optimizer", *(heading for _, heading, _ in shown)], rows)


def _details(run: Run) -> dict[str, Any]:
    """All that is needed to get a run again, and what it noticed."""
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
            "diagnostics": ", ".join(counters) or "no counter above zero" * run.finished,
        },
        "settings": {name: _as_text(value) for name, value in flat(run.settings).items()},
    }


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)


def _distinct_hardware(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.hardware for run in runs))
