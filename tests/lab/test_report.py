"""Run folders are read back and shown as tables, figures and a page."""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from kronbit.lab.errors import LabError
from kronbit.lab.report import writing as report_module
from kronbit.lab.report.curves import curve
from kronbit.lab.report.outcomes import outcomes
from kronbit.lab.report.runs import find_runs, read_run
from kronbit.lab.report.tables import show_table
from kronbit.lab.report.writing import write_report

MIB = 2**20
LABELS = {
    "base": "AdamW",
    "shampoo-32": "+ 32-bit Shampoo",
    "shampoo-4-paper": "+ 4-bit Shampoo (paper)",
    "shampoo-4": "+ 4-bit Shampoo",
}
STATES = {"base": 0, "shampoo-32": 20 * MIB, "shampoo-4-paper": 3 * MIB, "shampoo-4": 2 * MIB}


def write_run(
    parent: Path,
    variant: str,
    seed: int = 0,
    losses: list[float] | None = None,
    recipe: str = "pydoc-gpt",
    label: str | None = None,
    summary: bool = True,
    accuracy: float | None = None,
    diagnostics: dict[str, int] | None = None,
    **settings: Any,
) -> Path:
    """Write a run folder with an evaluation every 10 steps and a training line every 5."""
    losses = [2.5, 2.0, 1.8, 1.7] if losses is None else losses
    folder = parent / f"{variant}-seed{seed}"
    folder.mkdir(parents=True)
    origin = {
        "label": LABELS.get(variant, variant) if label is None else label,
        "variant": variant,
        "seed": seed,
        "command": f'kronbit train {recipe} --seed {seed} --set model.name="a<b>&c"',
        "versions": {"kronbit": "0.6.0", "python": "3.11.7", "torch": "2.11.0", "cuda": None},
        "hardware": "A machine, 2 cores",
    }
    recipe_settings = {"name": recipe, "about": "A test.", "seed": seed, "model": {"width": 8}}
    info = origin | {"recipe": recipe_settings | settings, "started": "2026-11-16T12:00:00+00:00"}
    (folder / "run.json").write_text(json.dumps({"format": 1, **info}))
    lines: list[dict[str, Any]] = []
    for place, loss in enumerate(losses):
        for step in (10 * place + 5, 10 * place + 10):
            times = [10.0 + 0.1 * seed, 11.0, 12.0, 13.0, 60.0]
            line = {"kind": "train", "step": step, "loss": loss - 0.1, "seconds": step / 50}
            lines.append({**line, "step_ms": times})
        scores = {} if accuracy is None else {"accuracy": accuracy * (place + 1) / len(losses)}
        step = 10 * place + 10
        lines.append({"kind": "eval", "step": step, "seconds": step / 50, "loss": loss, **scores})
        if STATES[variant]:
            error = {"nre": 0.1 / (place + 1), "angle": 5.0 / (place + 1)}
            lines.append({"kind": "errors", "step": step, "seconds": step / 50, **error})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        steps = 10 * len(losses)
        content = {
            "format": 1,
            **origin,
            "recipe": recipe,
            "steps": steps,
            "finished": True,
            "train_loss": losses[-1] - 0.1,
            "loss": losses[-1],
            "best_loss": min(losses),
            "accuracy": accuracy,
            "best_accuracy": accuracy,
            "seconds": steps / 50,
            "step_ms": {"median": 12.0, "mean": 21.2 + 0.02 * seed, "p5": 10.0, "p95": 60.0},
            "memory": {
                "peak": 100 * MIB + STATES[variant] + seed,
                "peak_is": "resident above the start",
                "parameters": 4 * MIB,
                "gradients": 4 * MIB,
                "base": 8 * MIB,
                "statistics": STATES[variant] // 2,
                "roots": STATES[variant] // 2,
            },
            "diagnostics": diagnostics or {},
            "errors": {"nre": 0.025, "angle": 1.25} if STATES[variant] else None,
        }
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


@dataclass
class Row:
    name: str
    heading: str = ""
    cells: dict[str, tuple[str | None, str]] = field(default_factory=dict)


class Page(HTMLParser):
    """The tags, tables and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[Row]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self._key: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and "data-row" in attributes:
            self.tables[-1].append(Row(attributes["data-row"] or ""))
        elif tag == "td" and "data-key" in attributes:
            self._key = attributes["data-key"] or ""
            self.tables[-1][-1].cells[self._key] = (attributes.get("data-value"), "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag  # every tag is closed, in order
        self._key = None if tag == "td" else self._key

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        self.texts[self._open[-1]][-1] += data
        if self._open[-1] == "td" and self._key is not None:
            cells = self.tables[-1][-1].cells
            cells[self._key] = (cells[self._key][0], cells[self._key][1] + data)
        elif self._open[-1] == "th" and self.tables and self.tables[-1]:
            self.tables[-1][-1].heading += data


@dataclass
class Written:
    folder: Path
    page: Page
    comparison: Path
    faulty: Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write a report on two recipes: one with several seeds, one with faulty runs.

    These have a single evaluation, diverge, are unfinished, or have a label that must be escaped.
    """
    root = tmp_path_factory.mktemp("lab")
    comparison, faulty = root / "comparison", root / "odd"
    for seed, last in enumerate((1.0, 1.2, 1.7)):
        write_run(comparison, "base", seed, [2.5, 2.2, 2.0 + 0.1 * seed, 1.8 + 0.1 * seed])
        write_run(comparison, "shampoo-4", seed, [2.5, 1.6, 1.4 + last / 10, last])
    write_run(comparison, "shampoo-32", 0, [2.4, 1.95, 1.5, 1.0], diagnostics={"kept": 3, "no": 0})
    write_run(comparison, "shampoo-4-paper", 0, [2.6, 2.5, 2.4, 2.3])
    accuracy = {"recipe": "digits <mlp>", "accuracy": 0.9}
    write_run(faulty, "base", 7, [0.5], **accuracy)  # a single point
    write_run(faulty, "shampoo-32", 7, [0.4, math.inf, math.nan], **accuracy)
    hostile_label = '<script>alert("1")</script> $x$ & co'
    write_run(faulty, "shampoo-4", 7, [0.4, 0.3], label=hostile_label, **accuracy)
    unfinished = write_run(faulty, "shampoo-4-paper", 7, [0.6, 0.4], summary=False, **accuracy)
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9')
    folder = root / "out"
    path = write_report(
        find_runs([comparison, faulty]), folder, "Two <recipes>", "kronbit report a & b"
    )
    assert path == folder / "report.html"
    return Written(folder, Page(path.read_text(encoding="utf-8")), comparison, faulty)


def numbers(summary: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a summary that a report shows, by the report's keys."""
    flat: dict[str, float] = {}
    for key, value in summary.items():
        if isinstance(value, dict) and key in ("step_ms", "memory", "errors"):
            flat |= numbers(value, f"{key}.")
        elif isinstance(value, int | float) and key not in ("format", "finished"):
            flat[prefix + key] = value
    return flat


def same(actual: str | None, expected: float) -> bool:
    if actual is None:
        return False
    return float(actual) == expected or (actual == "NaN" and math.isnan(expected))


def test_page_shows_every_number_of_every_summary(written: Written) -> None:
    shown: dict[tuple[int, str], dict[str, tuple[str | None, str]]] = {}
    for place, rows in enumerate(written.page.tables):
        for row in rows:
            shown.setdefault((place, row.name), {}).update(row.cells)
    compared = 0
    for folder in (written.comparison, written.faulty):
        for path in folder.glob("*/summary.json"):
            tables = [cells for (_, name), cells in shown.items() if name == path.parent.name]
            summary = json.loads(path.read_text())
            for key, value in numbers(summary).items():
                assert any(same(cells.get(key, (None, ""))[0], value) for cells in tables), key
                compared += 1
    assert compared > 11 * 15  # runs, times numbers


def test_page_aggregates_seeds(written: Written) -> None:
    first = {row.name: row for row in written.page.tables[0]}
    assert list(first) == ["base", "shampoo-32", "shampoo-4-paper", "shampoo-4"]
    cells = first["shampoo-4"].cells
    assert cells["runs"][0] == "3"
    assert float(cells["loss"][0] or "nan") == pytest.approx(1.3)
    assert cells["loss"][1] == "1.3000 ± 0.4000"  # 1.0, 1.2 and 1.7
    assert cells["state"] == (str(float(2 * MIB)), "2.0 MiB")
    assert cells["of_32"] == ("0.1", "10 %")
    # The base ends at 1.9; the means are 2.5, 1.6, ...: the second evaluation of four.
    assert cells["steps_to_base"] == ("0.5", "0.50")
    assert first["shampoo-4-paper"].cells["steps_to_base"][1] == "> 1.00"
    assert first["base"].cells["state"][1] == "\u2013"
    assert float(cells["memory.peak"][0] or "nan") == 102 * MIB + 1  # mean of + 0, + 1 and + 2


def test_page_is_self_contained_and_escaped(written: Written) -> None:
    tags = [tag for tag, _ in written.page.tags]
    assert not {"script", "link", "iframe", "object"} & set(tags)
    for _, attrs in written.page.tags:
        assert not any(name.startswith("on") or name in ("href", "srcset") for name in attrs)
        assert (attrs.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
    style = written.page.texts["style"][0]
    assert "url(" not in style
    assert "@import" not in style
    assert written.page.texts["title"] == ["Two <recipes>"] == written.page.texts["h1"]
    assert written.page.texts["h2"] == ["pydoc-gpt", "digits <mlp>"]
    headings = [row.heading for rows in written.page.tables for row in rows]
    assert '<script>alert("1")</script> $x$ & co' in headings
    commands = written.page.texts["pre"]
    assert commands[0] == "kronbit report a & b"
    assert 'kronbit train pydoc-gpt --seed 2 --set model.name="a<b>&c"' in commands
    assert tags.count("caption") == tags.count("table")
    assert "kept: 3" in written.page.texts["dd"]


def test_page_marks_diverged_and_unfinished_runs(written: Written) -> None:
    # The tables of a recipe: comparison, results and memory of every run, then settings.
    first = next(i for i, rows in enumerate(written.page.tables) if "seed7" in str(rows)) - 1
    rows = {row.name: row for rows in written.page.tables[first : first + 2] for row in rows}
    diverged, unfinished = rows["shampoo-32"], rows["shampoo-4-paper"]
    assert diverged.heading == "+ 32-bit Shampoo (diverged)"
    assert diverged.cells["loss"] == ("NaN", "NaN")
    assert rows["shampoo-32-seed7"].cells["loss"] == ("NaN", "NaN")
    assert unfinished.heading == "+ 4-bit Shampoo (paper) (unfinished)"
    assert unfinished.cells["loss"] == ("0.4", "0.4000")
    assert any("A cross" in text for text in written.page.texts["figcaption"])


def test_images_are_complete_and_nothing_is_clipped(written: Written) -> None:
    from PIL import Image

    images = [attrs for tag, attrs in written.page.tags if tag == "img"]
    files = {path.read_bytes() for path in written.folder.glob("*.png")}
    assert len(images) == len(files) == 8 + 9  # without and with accuracy
    assert not list(written.folder.glob("*.new"))
    for attrs in images:
        content = base64.b64decode((attrs["src"] or "").partition(",")[2], validate=True)
        assert content in files
        image = Image.open(io.BytesIO(content)).convert("RGB")
        assert image.size == (int(attrs["width"] or 0), int(attrs["height"] or 0))
        assert 800 <= image.width <= 1600
        assert 300 <= image.height <= 1600
        assert len(attrs["alt"] or "") > 40
        for edge in (
            (0, 0, image.width, 2),
            (0, image.height - 2, image.width, image.height),
            (0, 0, 2, image.height),
            (image.width - 2, 0, image.width, image.height),
        ):
            assert image.crop(edge).getextrema() == ((255, 255),) * 3, attrs["alt"]
    ours = (0xE0, 0x8A, 0x3C)
    with Image.open(written.folder / "pydoc-gpt-loss_steps.png") as image:
        counts = image.convert("RGB").getcolors(2**24) or []
    assert {colour: count for count, colour in counts}[ours] > 500


def test_curves_average_seeds_at_common_steps(tmp_path: Path) -> None:
    write_run(tmp_path, "shampoo-4", 0, [3.0, 2.0, 1.0])
    write_run(tmp_path, "shampoo-4", 1, [4.0, math.nan])
    losses = curve(find_runs([tmp_path]), "evals", "loss")
    assert losses.steps == [10, 20]  # the steps that both runs have
    assert losses.seconds == [0.2, 0.4]
    assert (losses.mean[0], losses.low[0], losses.high[0]) == (3.5, 3.0, 4.0)
    assert losses.diverged
    assert losses.finite == 1


def test_settings_and_machines_distinguish_variants(tmp_path: Path) -> None:
    for place, lr in enumerate((0.1, 0.2)):
        for seed in (0, 1):
            write_run(tmp_path / str(place), "shampoo-4", seed, lr=lr, log_every=place)
    compared = outcomes(find_runs([tmp_path / "0", tmp_path / "1"]))
    labels = [outcome.label for outcome in compared]
    assert labels == ["+ 4-bit Shampoo (lr=0.1)", "+ 4-bit Shampoo (lr=0.2)"]
    assert [[run.seed for run in outcome.counted] for outcome in compared] == [[0, 1], [0, 1]]
    run_file = tmp_path / "0" / "shampoo-4-seed1" / "run.json"
    run_file.write_text(run_file.read_text().replace("A machine, 2 cores", "Another"))
    first, second = outcomes(find_runs([tmp_path / "0"]))
    assert (first.label, second.label) == (
        "+ 4-bit Shampoo (hardware=A machine, 2 cores)",
        "+ 4-bit Shampoo (hardware=Another)",
    )


def test_unfinished_seeds_do_not_count_beside_finished_ones(tmp_path: Path) -> None:
    write_run(tmp_path, "shampoo-4", 0, [2.0, 1.0])
    write_run(tmp_path, "shampoo-4", 1, [2.0], summary=False)
    write_run(tmp_path, "base", 1, [3.0, math.nan], summary=False)
    write_run(tmp_path, "base", 2, [3.0, 2.0])
    base, shampoo = outcomes(find_runs([tmp_path]))
    assert [run.seed for run in shampoo.counted] == [0]
    # Without the diverged seed, the mean would look better.
    assert [run.seed for run in base.counted] == [1, 2]
    assert math.isnan(base.losses.mean[-1])


def test_a_run_folder_is_read_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "shampoo-4", 3, [2.0, 1.5], lr=0.25)
    run = read_run(folder)
    assert (run.label, run.variant, run.seed) == ("+ 4-bit Shampoo", "shampoo-4", 3)
    assert (run.recipe, run.settings["lr"], run.finished) == ("pydoc-gpt", 0.25, True)
    assert [line["step"] for line in run.train] == [5, 10, 15, 20]
    assert [line["loss"] for line in run.evals] == [2.0, 1.5]
    assert [line["nre"] for line in run.errors] == [0.1, 0.05]
    assert run.summary == json.loads((folder / "summary.json").read_text())
    assert len(run.step_ms) == 20


def test_summary_of_unfinished_run_is_computed_from_its_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "shampoo-4", 0, [2.0, 1.5, 1.6], summary=False)
    metrics = folder / "metrics.jsonl"
    whole = read_run(folder)
    assert not whole.finished
    assert whole.recipe == "pydoc-gpt"
    assert (whole.summary["loss"], whole.summary["best_loss"], whole.summary["steps"]) == (
        1.6,
        1.5,
        30,
    )
    assert whole.summary["step_ms"]["median"] == 12.0
    metrics.write_text(metrics.read_text() + '{"kind": "eval", "step": 40, "lo')
    assert read_run(folder).evals == whole.evals
    metrics.unlink()
    assert read_run(folder).train == []


def test_null_losses_are_nan(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "base", 0, [2.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 20, "seconds": 1.0, "loss": null}\n')
    run = read_run(folder)
    assert math.isnan(run.evals[-1]["loss"])
    assert run.diverged


@pytest.mark.parametrize("broken", ['{"kind": "tra', "[1]", '{"kind": "eval", "step": 3}', "\xff"])
def test_broken_lines_are_named(tmp_path: Path, broken: str) -> None:
    folder = write_run(tmp_path, "base")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for place in (2, len(lines)):
        content = "\n".join([*lines[:place], broken, *lines[place:]]) + "\n"
        metrics.write_bytes(content.encode("latin-1"))
        with pytest.raises(LabError, match=rf"metrics.jsonl, line {place + 1} is broken") as caught:
            find_runs([folder])
        assert "\n" not in str(caught.value)


def test_folders_without_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    broken = write_run(tmp_path, "base")
    (broken / "run.json").write_text('{"format": 1, "label": "x"}')
    newer = write_run(tmp_path, "base", 1)
    (newer / "summary.json").write_text('{"format": 2}')
    for name, message in (
        ("nowhere", "nowhere does not exist"),
        ("empty", "empty holds no run"),
        ("file", "file is a file"),
        ("base-seed0", "run.json has no 'variant'"),
        ("base-seed1", "summary.json has format 2"),
    ):
        with pytest.raises(LabError, match=message):
            find_runs([tmp_path / name])
    with pytest.raises(LabError, match="no runs"):
        write_report([], tmp_path, "", "")


def test_runs_are_found_once_and_in_order(tmp_path: Path) -> None:
    for variant in ("shampoo-4", "base", "shampoo-32"):
        write_run(tmp_path, variant, 1)
        write_run(tmp_path, variant, 0)
    runs = find_runs([tmp_path / "base-seed1", tmp_path])
    assert [run.folder.name for run in runs] == [
        *("base-seed1", "base-seed0", "shampoo-32-seed0", "shampoo-32-seed1"),
        *("shampoo-4-seed0", "shampoo-4-seed1"),
    ]


def test_report_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "draw_figures", lambda compared: [])
    runs = find_runs([write_run(tmp_path, "base")])
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    with pytest.raises(LabError, match=r"cannot write .*report\.html"):
        write_report(runs, tmp_path / "out", "", "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_terminal_table_fits(written: Written, width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    show_table(find_runs([written.comparison]), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.startswith("+ 4-bit Shampoo  "))
    assert "1.3000 ± 0.4000" in row
    for text, least in (
        ("0.50", 80),
        ("2.0 MiB", 80),
        ("10 %", 80),
        ("12.0", 80),
        ("102 MiB", 120),
        ("0.80", 120),
    ):
        assert (text in row) or width < least, text
    assert not any("\u2026" in line for line in lines)


def test_terminal_table_takes_labels_literally(tmp_path: Path) -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    write_run(tmp_path, "shampoo-4", 0, [1.0, math.nan], label="[red]x[/red]", accuracy=0.5)
    show_table(find_runs([tmp_path]), console)
    text = console.export_text()
    assert "[red]x[/red] (diverged)" in text
    assert "NaN" in text
    assert "50.0 %" in text


def test_page_works_in_a_browser(written: Written, browser: Any) -> None:
    for width in (1280, 400):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((written.folder / "report.html").as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
        wide = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.body.scrollWidth,"
            " ...[...document.images].map(e => e.getBoundingClientRect().right)]"
        )
        assert max(wide) <= width
        images = browser.execute_script("return [...document.images].map(e => e.naturalWidth)")
        assert len(images) == 17
        assert min(images) > 0
    cells = browser.execute_script(
        "return [...document.querySelectorAll('tr[data-row] td[data-key=\"loss\"]')].map(e =>"
        " [e.parentElement.dataset.row, e.dataset.value ?? null, e.innerText])"
    )
    for path in written.comparison.glob("*/summary.json"):
        loss = json.loads(path.read_text())["loss"]
        assert [path.parent.name, json.dumps(loss), f"{loss:.4f}"] in cells
    background = "return getComputedStyle(document.body).backgroundColor"
    seen = set()
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        seen.add(browser.execute_script(background))
    assert len(seen) == 2
    assert browser.get_log("browser") == []
