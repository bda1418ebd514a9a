"""The pages of results say what the raw files say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kronbit.lab.optimizers import check_optimizer, variant
from kronbit.lab.recipe import find_recipe, parse_settings
from kronbit.lab.report.runs import read_run
from kronbit.lab.training.display import Display
from kronbit.lab.training.experiment import Member, run_member
from kronbit.lab.training.interrupts import Interrupts
from kronbit.lab.training.loop import Running
from kronbit.lab.training.world import join_world

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import collect_results  # noqa: E402
import result_pages  # noqa: E402
import trainings  # noqa: E402

PAGES = result_pages.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_raw_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert result_pages.filled(text) == text, "run python benchmarks/result_pages.py"


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


@pytest.mark.parametrize("name", trainings.TRAININGS)
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


def test_trainings_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("steps=40", "batch=20", "eval_every=20", "checkpoint_every=10", "keep=1")
    own = trainings.Trainings("digits-cnn", ("base", "shampoo-4 lr=0.02"), small, 2, flags=())
    monkeypatch.setitem(trainings.TRAININGS, "small", own)
    words = ["small", "--data", "data", "--out", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results"), "--together", "2"]
    first = tmp_path / "runs" / "small" / "base-seed0"

    assert trainings.main([*words, "--seconds", "0"]) == 1  # nothing has begun
    assert not first.exists()
    assert trainings.main(words) == 0
    path = tmp_path / "results" / "small" / "summary.json"
    whole = json.loads(path.read_text())
    assert [(run["variant"], run["seed"]) for run in whole["runs"]] == [
        ("base", 0),
        ("base", 1),
        ("shampoo-4-lr=0.02", 0),
        ("shampoo-4-lr=0.02", 1),
    ]
    # One that was killed after its last checkpoint.
    (first / "summary.json").unlink()
    (first / "base-seed0" / "summary.json").unlink()
    began = (first / "base-seed0" / "run.json").read_text()
    assert trainings.main(words) == 0
    assert (first / "base-seed0" / "run.json").read_text() == began
    assert json.loads(path.read_text())["runs"] == whole["runs"]
