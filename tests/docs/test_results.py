"""Tables in the docs match the raw files of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kronbit.lab.optimizers import variant
from kronbit.lab.recipe import find_recipe, parse_settings
from kronbit.lab.report.runs import read_run
from kronbit.lab.training.experiment import Trial, run_trial
from kronbit.lab.training.terminal import Terminal
from kronbit.lab.training.world import join_world

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "training"))
import collect_results  # noqa: E402
import result_pages  # noqa: E402
import training_tables  # noqa: E402

PAGES = result_pages.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_match_the_raw_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert result_pages.filled(text) == text, "run python benchmarks/training/result_pages.py"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in result_pages.TABLES if f"<!-- table: {name} -->" not in text]
    assert not missing


def test_a_collected_run_has_its_curves(tmp_path: Path) -> None:
    settings = ["steps=12", "batch=20", "log_every=4", "eval_every=6", "first_refresh=null"]
    recipe = find_recipe("digits-cnn").with_settings(
        parse_settings([*settings, "update_every=5", "refresh_every=5"])
    )
    key, label, member_recipe = variant("shampoo-4 lr=0.02", recipe)
    world = join_world("none", "cpu")
    with Terminal(Console(quiet=True)) as terminal:
        member = Trial(key, label, member_recipe, "kronbit train")
        run_trial(member, tmp_path / "run", world, terminal, False)
    run = read_run(tmp_path / "run")
    path = tmp_path / "results" / "summary.json"
    collect_results.write(path, {"runs": [collect_results.collect(run, side_by_side=2)]})
    (row,) = json.loads(path.read_text())["runs"]
    assert row["lr"] == 0.02
    assert "seconds" not in row
    assert row["curve"]["step"] == [6, 12]
    assert row["curve"]["loss"] == pytest.approx([line["loss"] for line in run.evals], rel=1e-5)
    # Training losses are logged at steps 4, 6, 8 and 12.
    losses = [line["loss"] for line in run.train]
    means = [(4 * losses[0] + 2 * losses[1]) / 6, (2 * losses[2] + 4 * losses[3]) / 6]
    assert row["curve"]["train_loss"] == pytest.approx(means, rel=1e-5)
    assert row["errors"]["step"] == [5, 10]
    assert len(row["errors"]["off_diagonal"]["nre"]) == 2


def test_a_diverged_run_has_no_score(tmp_path: Path) -> None:
    recipe = find_recipe("digits-cnn").with_settings(
        parse_settings(["steps=12", "batch=20", "log_every=2", "eval_every=2", "lr=1e30"])
    )
    key, label, member_recipe = variant("base", recipe)
    with Terminal(Console(quiet=True)) as terminal:
        member = Trial(key, label, member_recipe, "kronbit train --data x --set lr=1e30")
        world = join_world("none", "cpu")
        run_trial(member, tmp_path / "run", world, terminal, False)
    target = tmp_path / "summary.json"
    collect_results.write_collected([tmp_path / "run"], target)
    (row,) = json.loads(target.read_text())["runs"]
    assert row["diverged"]
    assert None in row["curve"]["loss"]
    assert row["command"] == "kronbit train --set lr=1e30"
    assert training_tables.score_text(row) == "diverged"
    good = {"accuracy": 0.1, "loss": 5.0}
    assert training_tables.best_of([row, good]) is training_tables.best_of([good, row]) is good
