"""The report of a comparison: figures, and a page that explains itself and needs no other file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kronbit.lab.errors import LabError
from kronbit.lab.report.cost_figures import peak_kind
from kronbit.lab.report.figures import draw_figures
from kronbit.lab.report.numbers import (
    bytes_text,
    count_text,
    degrees_text,
    loss_text,
    percent_text,
    time_text,
)
from kronbit.lab.report.outcomes import Outcome, find, flat, number, outcomes, shown_columns
from kronbit.lab.report.page import Cell, facts, folded, image_figure, page, settings_table, table
from kronbit.lab.report.runs import Run, by_recipe
from kronbit.lab.training.files import make_folder, write_bytes

# Every number of a summary: where it is, its heading, and how it is written.
_Number = tuple[tuple[str, ...], str, Callable[[float | None], str]]
_RESULTS: tuple[_Number, ...] = (
    (("seed",), "seed", count_text),
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
    (("seed",), "seed", count_text),
    (("memory", "parameters"), "parameters", bytes_text),
    (("memory", "gradients"), "gradients", bytes_text),
    (("memory", "base"), "base's\nstate", bytes_text),
    (("memory", "statistics"), "statistics", bytes_text),
    (("memory", "roots"), "inverse\nroots", bytes_text),
    (("memory", "peak"), "peak", bytes_text),
)


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
    recipes = by_recipe(runs)
    files: dict[str, bytes] = {}
    sections = []
    for place, (recipe, own) in enumerate(recipes.items()):
        found = outcomes(own)
        drawings = draw_figures(found)
        before = f"{_file_name(recipe)}-" if len(recipes) > 1 else ""
        files |= {f"{before}{drawing.name}.png": drawing.png for drawing in drawings}
        figures = "\n".join(
            image_figure(drawing.title, drawing.caption, drawing.alt, drawing.png)
            for drawing in drawings
        )
        sections.append(_section(recipe, own, found, figures, f"r{place}"))
    body = "\n".join([_header(runs, title, command), *sections])
    files["report.html"] = page(title, body).encode()  # last: whoever sees it finds its figures
    make_folder(folder)
    for name, content in files.items():
        write_bytes(folder / name, content)
    return folder / "report.html"


def _file_name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "_", recipe).strip("._") or "recipe"


def _header(runs: Sequence[Run], title: str, command: str) -> str:
    days = sorted({run.started[:10] for run in runs if run.started})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    parts = [f"{len(runs)} run{'s' if len(runs) > 1 else ''}", when, *_distinct_hardware(runs)]
    versions = [text for text in dict.fromkeys(map(_versions, runs)) if text]
    parts += versions[:1] if len(versions) == 1 else ["several versions, see the runs"]
    return (
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="soft">'
        f"{escape(' · '.join(part for part in parts if part))}</p>\n"
        f"<pre>{escape(command)}</pre>\n</header>"
    )


def _section(
    recipe: str, runs: Sequence[Run], found: Sequence[Outcome], figures: str, name: str
) -> str:
    """A recipe's part of the page."""
    abouts = dict.fromkeys(str(run.settings.get("about") or "") for run in runs)
    hardware = _distinct_hardware(runs)
    parts = [f"<section>\n<h2>{escape(recipe)}</h2>"]
    parts += [f"<p>{escape(about)}</p>" for about in abouts if about]
    if len(hardware) > 1:
        parts.append(
            "<p><strong>Not all runs are from the same machine: do not compare their times and "
            f"their peak memory.</strong> {escape('; '.join(hardware))}.</p>"
        )
    parts += [_tiles(found), _comparison(found)]
    parts.append(f'<h3>Figures</h3>\n<div class="figures">\n{figures}\n</div>' if figures else "")
    parts.append("<h3>Every run</h3>")
    parts.append(_numbers("Results of every run, as its summary.json says.", runs, _RESULTS))
    what = peak_kind(found)
    caption = f"Memory of every run{f'; the peak is what was {what}' if what else ''}."
    parts.append(_numbers(caption, runs, _MEMORY))
    parts += [_details(run, f"{name}-{place}") for place, run in enumerate(runs)]
    parts.append("</section>")
    return "\n".join(part for part in parts if part)


def _tiles(found: Sequence[Outcome]) -> str:
    """What 4 bits come to beside the base, in large print; nothing if it is unclear what is."""
    base = find(found, "base")
    others = [own for own in found if own.variant != "base"]
    own = find(found, "shampoo-4") or (others[0] if len(others) == 1 else None)
    if base is None or own is None:
        return ""
    tiles = []
    for key, what, write in (
        ("loss", "validation loss", loss_text),
        ("accuracy", "accuracy", percent_text),
    ):
        mine, its = own.spread(key), base.spread(key)
        if mine is not None and its is not None:
            tiles.append((write(mine.mean), what, f"{base.label}: {write(its.mean)}"))
    if own.steps_to_base is not None:
        if own.reached_base:
            share = f"{100 * own.steps_to_base:.0f} %"
            tiles.append((share, f"of {base.label}'s steps", f"until {base.label}'s last loss"))
        else:
            tiles.append(("not reached", f"{base.label}'s last loss", "in all its steps"))
    full = find(found, f"{own.variant.split('-')[0]}-32")
    if own.state is not None and own.state.mean:
        beside = ""
        if own.of_32 and full is not None and full.state is not None:
            beside = f"32-bit: {bytes_text(full.state.mean)}, {1 / own.of_32:.1f} times as much"
        tiles.append((bytes_text(own.state.mean), "second-order state", beside))
    mine, its = own.spread("step_ms", "mean"), base.spread("step_ms", "mean")
    if mine is not None and its is not None:
        beside = f"{base.label}: {time_text(its.mean)} ms"
        tiles.append((f"{time_text(mine.mean)} ms", "per step, mean", beside))
    items = "\n".join(
        f"<li><b>{escape(value)}</b><span>{escape(what)}</span>"
        f'<span class="soft">{escape(beside)}</span></li>'
        for value, what, beside in tiles
    )
    heading = f"<h3>{escape(own.full_label)} beside {escape(base.full_label)}</h3>"
    return f'{heading}\n<ul class="tiles">\n{items}\n</ul>'


def _comparison(found: Sequence[Outcome]) -> str:
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
        rows.append((own.variant, own.full_label, cells))
    caption = "What each optimizer came to"
    if several:
        caption += ": means over its runs, ± the largest distance of a run from the mean"
    caption += "."
    base = find(found, "base")
    if base is not None and len(found) > 1:
        caption += (
            f" Steps to base loss: when the validation loss first was at most the last one of "
            f"{base.label}, as a share of its steps."
        )
    headings = ["optimizer", *(["runs"] if several else []), *(column.title for column in columns)]
    return table(caption, headings, rows)


def _numbers(caption: str, runs: Sequence[Run], wanted: Sequence[_Number]) -> str:
    """A table of numbers of the summaries, those that some run has."""
    shown = [
        (path, heading, write)
        for path, heading, write in wanted
        if path == ("seed",) or any(number(run.summary, *path) is not None for run in runs)
    ]
    rows = []
    for run in runs:
        values = [
            run.seed if path == ("seed",) else number(run.summary, *path) for path, *_ in shown
        ]
        cells = [
            Cell(".".join(path), value, write(value))
            for (path, _, write), value in zip(shown, values, strict=True)
        ]
        rows.append((run.folder.name, _name(run), cells))
    return table(caption, ["optimizer", *(heading for _, heading, _ in shown)], rows)


def _details(run: Run, name: str) -> str:
    """All that is needed to get a run again, and what it noticed."""
    counters = {
        key: count
        for key, count in (run.summary.get("diagnostics") or {}).items()
        if isinstance(count, int | float) and count
    }
    known = {
        "seed": str(run.seed),
        "started": run.started,
        "folder": run.folder.name,
        "hardware": run.hardware,
        "versions": _versions(run),
        "diagnostics": ", ".join(f"{key}: {count_text(count)}" for key, count in counters.items())
        or ("no counter above zero" if run.finished else ""),
    }
    settings = settings_table("Settings of the recipe, as this run took them.", flat(run.settings))
    body = f"<pre>{escape(run.command)}</pre>\n{facts(known)}\n{folded('Settings', settings)}"
    return folded(f"{_name(run)}, seed {run.seed}", body, name)


def _name(run: Run) -> str:
    notes = [
        note
        for note, true in (("diverged", run.diverged), ("unfinished", not run.finished))
        if true
    ]
    return f"{run.label} ({', '.join(notes)})" if notes else run.label


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)


def _distinct_hardware(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.hardware for run in runs))
