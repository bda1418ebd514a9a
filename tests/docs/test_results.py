"""The pages of results say what the raw files say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.numerics import slow

from kronbit.lab.optimizers import check_optimizer, variant
from kronbit.lab.recipe import find_recipe, parse_settings
from kronbit.lab.report.runs import read_run
from kronbit.lab.training.display import Display
from kronbit.lab.training.experiment import Member, run_member
from kronbit.lab.training.interrupts import Interrupts
from kronbit.lab.training.running import Running
from kronbit.lab.training.world import join_world

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "training"))
import collect_results  # noqa: E402
import result_pages  # noqa: E402
import trainings  # noqa: E402

PAGES = result_pages.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_raw_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert result_pages.filled(text) == text, "run python benchmarks/training/result_pages.py"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in result_pages.TABLES if f"<!-- table: {name} -->" not in text]
    assert not missing


def test_a_run_is_collected_with_its_curves(tmp_path: Path) -> None:
    given = ["steps=12", "batch=20", "log_every=4", "eval_every=6", "first_refresh=null"]
    recipe = find_recipe("digits-cnn").with_settings(
        parse_settings([*given, "update_every=5", "refresh_every=5"])
    )
    key, label, made = variant("shampoo-4 lr=0.02", recipe)
    world, running = join_world("none", "cpu"), Running(Path("data"))
    with Display(Console(quiet=True)) as display:
        member = Member(key, label, made, "kronbit train")
        run_member(member, tmp_path / "run", world, running, display, False, Interrupts())
    run = read_run(tmp_path / "run")
    path = tmp_path / "results" / "summary.json"
    collect_results.write(path, {"runs": [collect_results.collected(run, side_by_side=2)]})
    (found,) = json.loads(path.read_text())["runs"]
    assert found["lr"] == 0.02
    assert "seconds" not in found
    assert found["curve"]["step"] == [6, 12]
    assert found["curve"]["loss"] == pytest.approx([line["loss"] for line in run.evals], rel=1e-5)
    # Lines of training end at 4, 6, 8 and 12.
    losses = [line["loss"] for line in run.train]
    means = [(4 * losses[0] + 2 * losses[1]) / 6, (2 * losses[2] + 4 * losses[3]) / 6]
    assert found["curve"]["train_loss"] == pytest.approx(means, rel=1e-5)
    assert found["errors"]["step"] == [5, 10]
    assert len(found["errors"]["off_diagonal"]["nre"]) == 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow if number % 4 else ())
        for number, name in enumerate(trainings.TRAININGS)
    ],
)
def test_every_training_can_begin(name: str) -> None:
    own = trainings.TRAININGS[name]
    recipe = find_recipe(own.recipe).with_settings(parse_settings(own.settings))
    for member in own.members:
        made = variant(member, recipe)[2]
        if importlib.util.find_spec(made.base.partition(".")[0]) or "." not in made.base:
            check_optimizer(made)
    assert len(own.commands()) == own.seeds * len(own.members)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "results").glob("*-epochs")))
def test_raw_files_are_of_the_trainings(name: str) -> None:
    """The table of trainings is what was run."""
    found = {
        (run["variant"], run["seed"]) for run in result_pages.read(f"{name}/summary.json")["runs"]
    }
    own = trainings.TRAININGS[name]
    recipe = find_recipe(own.recipe)
    keys = [variant(member, recipe)[0] for member in own.members]
    assert found == {(key, seed) for key in keys for seed in range(own.seeds)}


@slow
def test_trainings_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("steps=80", "batch=20", "eval_every=40", "checkpoint_every=10", *trainings._LEAN)
    own = trainings.Trainings("digits-cnn", ("shampoo-4 lr=0.02",), small, flags=())
    monkeypatch.setitem(trainings.TRAININGS, "small", own)

    def run(folder: str, *more: str) -> int:
        out, results = str(tmp_path / folder), str(tmp_path / "results" / folder)
        return trainings.main(
            ["small", "--data", "elsewhere", "--out", out, "--results", results, *more]
        )

    def found(folder: str) -> dict[str, Any]:
        path = tmp_path / "results" / folder / "small" / "summary.json"
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def has_begun() -> bool:
        return any((tmp_path / "parts").glob("small/shampoo*/shampoo*/checkpoints/*"))

    # Time is up as soon as there is a checkpoint.
    with monkeypatch.context() as patched:
        patched.setattr(trainings.time, "monotonic", lambda: 1e9 if has_begun() else 0.0)
        assert run("parts", "--seconds", "60", "--together", "2") == 1
    assert "stopped" in capsys.readouterr().out
    assert not (tmp_path / "results" / "parts").exists()
    assert run("parts", "--together", "1") == 0
    (one,) = found("parts")["runs"]
    assert one["curve"]["step"] == [40, 80]
    assert one["variant"] == "shampoo-4-lr=0.02"
    assert "elsewhere" not in one["command"]
    assert "seconds" not in one  # runs that once shared the device have no times


def test_a_run_that_diverged_has_no_figure(tmp_path: Path) -> None:
    recipe = find_recipe("digits-cnn").with_settings(
        parse_settings(["steps=12", "batch=20", "log_every=2", "eval_every=2", "lr=1e30"])
    )
    key, label, made = variant("base", recipe)
    with Display(Console(quiet=True)) as display:
        member = Member(key, label, made, "kronbit train --data x --set lr=1e30")
        world, running = join_world("none", "cpu"), Running(Path("data"))
        run_member(member, tmp_path / "run", world, running, display, False, Interrupts())
    target = tmp_path / "summary.json"
    collect_results.write_collected([tmp_path / "run"], target)
    (found,) = json.loads(target.read_text())["runs"]
    assert found["diverged"]
    assert None in found["curve"]["loss"]
    assert found["command"] == "kronbit train --set lr=1e30"
    assert result_pages.score_text(found) == "diverged"
    good = {"accuracy": 0.1, "loss": 5.0}
    assert result_pages.best_of([found, good]) is result_pages.best_of([good, found]) is good
