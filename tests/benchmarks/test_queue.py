"""The queue of training runs has valid plans, fits runs into a time limit, and merges results."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.numerics import slow

from kronbit.lab.optimizers import check_optimizer, variant
from kronbit.lab.recipe import find_recipe, parse_settings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "training"))
import estimates  # noqa: E402
import processes  # noqa: E402
import run_queue  # noqa: E402
import trainings  # noqa: E402
from estimates import Estimate, finish_times, fitting  # noqa: E402
from result_files import ResultFiles  # noqa: E402

RAW = sorted(path.parent.name for path in (ROOT / "results").glob("*/summary.json"))
_SMALL = ("steps=80", "batch=20", "eval_every=40", "checkpoint_every=10", *trainings._LEAN)


def small(*specs: str, **options: Any) -> trainings.Trainings:
    return trainings.Trainings("digits-cnn", specs, _SMALL, flags=(), **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    return rows


# ------------------------------------------------------------------------------------------ plan


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow if number % 4 else ())
        for number, name in enumerate(trainings.TRAININGS)
    ],
)
def test_every_planned_run_can_start(name: str) -> None:
    planned = trainings.TRAININGS[name]
    recipe = find_recipe(planned.recipe).with_settings(parse_settings(planned.settings))
    for spec in planned.specs:
        made = variant(spec, recipe)[2]
        if "." not in made.base or importlib.util.find_spec(made.base.partition(".")[0]):
            check_optimizer(made)
    runs = planned.runs(name)
    assert len({run.name for run in runs}) == planned.seeds * len(planned.specs)


@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_every_run_has_a_valid_name_and_an_estimate(name: str) -> None:
    for run in trainings.TRAININGS[name].runs(name):
        assert run.variant == variant(run.spec, find_recipe(run.trainings.recipe))[0]
        assert run.name.replace("-", "").replace(".", "").replace("_", "").isalnum()
        if run.trainings.recipe != "pydoc-gpt":
            assert estimates.estimate(run).seconds > 0


@pytest.mark.parametrize("name", [name for name in RAW if name in trainings.TRAININGS])
def test_raw_files_match_the_plan(name: str) -> None:
    """Raw files hold only planned runs. Those of tables named ``*-epochs`` hold all of them."""
    done = {
        (row["variant"], row["seed"]) for row in rows_of(ROOT / "results" / name / "summary.json")
    }
    planned = {(run.variant, run.seed) for run in trainings.TRAININGS[name].runs(name)}
    assert done <= planned
    if name.endswith("-epochs"):
        assert done == planned


def test_rows_of_the_paper_have_its_settings() -> None:
    run = trainings.TRAININGS["cifar100-swin-tiny-100-epochs"].runs("table")[-1]
    recipe = estimates.recipe_of(run)
    options = recipe.second_order_options()
    assert (options["method"], options["storage"], options["split"]) == ("eigen", "paper", "greedy")
    assert (options["update_every"], options["refresh_every"]) == (100, 500)
    assert (options["first_refresh"], options["start"], options["damping"]) == (None, 1e-6, 1e-6)
    assert (recipe.epochs, recipe.lr, recipe.model["drop_path"]) == (100, 1e-3, 0.1)
    runs = trainings.TRAININGS["cifar100-swin-tiny-layers"].runs("table")
    for recipe in map(estimates.recipe_of, runs):
        options = recipe.second_order_options()
        assert (options["update_every"], options["refresh_every"]) == (200, 2000)
        if options["bits"] == 4:
            assert (options["method"], options["storage"]) == ("eigen", "paper")
    (run, _) = trainings.TRAININGS["cifar100-swin-tiny-schedule-free"].runs("table")
    recipe = estimates.recipe_of(run)
    assert (recipe.lr, recipe.base_options["warmup_steps"], recipe.epochs) == (0.0025, 10_000, 150)


# ------------------------------------------------------------------------------------------ time


def test_runs_that_share_a_gpu_finish_later() -> None:
    half, whole = Estimate(10, 100, 0.5), Estimate(10, 100, 1.0)
    assert finish_times([half, half], 2) == pytest.approx([100, 100])
    assert finish_times([whole, whole], 2) == pytest.approx([200, 200])
    assert finish_times([whole, whole], 1) == pytest.approx([100, 200])
    # The second run has the GPU to itself after the first one ends.
    assert finish_times([Estimate(10, 50, 1.0), whole], 2) == pytest.approx([100, 150])


def test_only_runs_that_end_in_time_are_chosen() -> None:
    runs = small("base", "base lr=1", "base lr=2").runs("small")
    loads = [Estimate(10, seconds, 1.0) for seconds in (300, 120, 90)]
    candidates = list(zip(runs, loads, strict=True))
    assert fitting(candidates, [], 250, 6) == runs[1:]
    assert fitting(candidates, [], 450, 6) == [runs[0], runs[1]]
    assert fitting(candidates, [Estimate(10, 100, 1.0)], 210, 6) == [runs[2]]
    assert fitting(candidates, [], float("inf"), 2) == runs


def test_timed_runs_have_the_gpu_to_themselves() -> None:
    shared = small("base", "base lr=1").runs("small")
    (alone,) = small("base", alone=True).runs("times")
    assert run_queue.startable([*shared, alone], [], 6) == shared
    assert run_queue.startable([alone, *shared], [], 6) == [alone]
    assert run_queue.startable(shared, [alone], 6) == []
    assert run_queue.startable(shared, [], 1) == shared[:1]


# ----------------------------------------------------------------------------------------- files


def test_files_of_runs_merge_into_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainings.TRAININGS, "small", small("base", "muon"))
    base, muon = trainings.TRAININGS["small"].runs("small")
    earlier, now = tmp_path / "earlier", tmp_path / "now"
    files = ResultFiles(now, (earlier,))

    def write(folder: Path, run: trainings.PlannedRun, **more: Any) -> Path:
        path = folder / "small" / "runs" / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"variant": run.variant, "seed": run.seed, "loss": 1.0}
        head = {"recipe": "digits-cnn", "hardware": "H", "versions": {}, "commit": "a"}
        path.write_text(json.dumps({**head, "side_by_side": 1, **more, "runs": [row]}))
        return path

    write(earlier, muon)
    assert files.is_done(muon)
    assert not files.is_done(base)
    assert files.merge("small") is None
    part = write(now, base, hardware="other")
    with pytest.raises(ValueError, match="hardware differs"):
        files.merge("small")
    write(now, base, commit="b", side_by_side=6)
    target = files.merge("small")
    assert target == now / "small" / "summary.json"
    content = json.loads(target.read_text())
    assert (content["commit"], content["side_by_side"]) == ("b, a", 6)
    rows = [(row["variant"], row["commit"], row["side_by_side"]) for row in content["runs"]]
    assert rows == [("base", "b", 6), ("muon", "a", 1)]
    assert not part.parent.exists()
    assert files.is_done(base)

    # A row that is planned later joins the table.
    monkeypatch.setitem(trainings.TRAININGS, "small", small("base", "shampoo-4", "muon"))
    new = trainings.TRAININGS["small"].runs("small")[1]
    assert not files.is_done(new)
    write(now, new)
    assert files.merge("small") == target
    assert [row["variant"] for row in rows_of(target)] == ["base", "shampoo-4", "muon"]
    assert rows_of(target)[0]["commit"] == "b"


# ----------------------------------------------------------------------------------------- queue


def test_the_queue_stops_resumes_and_keeps_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(trainings.TRAININGS):
        monkeypatch.delitem(trainings.TRAININGS, name)
    # The queue starts the longer run first, although the shorter one is listed first.
    monkeypatch.setitem(trainings.TRAININGS, "small", small("base steps=20", "base lr=0.02"))
    second, first = trainings.TRAININGS["small"].runs("small")
    results = tmp_path / "results"
    part = results / "small" / "runs" / f"{first.name}.json"

    def queue(out: str, *words: str) -> int:
        places = ["--data", "elsewhere", "--out", str(tmp_path / out), "--results", str(results)]
        return run_queue.main([*words, *places, "--together", "1"])

    @contextmanager
    def until(condition: Callable[[], bool]) -> Iterator[None]:
        """Make the time run out once the condition holds."""
        with monkeypatch.context() as patched:
            patched.setattr(processes.time, "monotonic", lambda: 1e9 if condition() else 0.0)
            yield

    def status() -> str:
        assert queue("one", "--status", "small") == 0
        return capsys.readouterr().out

    assert queue("one", "--next", "--seconds", "20") == 0  # too short for any run
    assert "started" not in capsys.readouterr().out
    assert "base lr=0.02, seed 0: open" in status()

    with until(lambda: any((tmp_path / "one").glob("small/*/*/checkpoints/*"))):
        assert queue("one", "--next", "--seconds", "60") == 1
    assert f"{first.path}: stopped" in capsys.readouterr().out
    assert "base lr=0.02, seed 0: stopped, step" in status()

    with until(part.is_file):  # before the second run starts
        assert queue("one", "--next", "--seconds", "60") == 0
    assert f"{first.path}: finished" in capsys.readouterr().out
    assert [row["curve"]["step"] for row in rows_of(part)] == [[40, 80]]
    assert "base lr=0.02, seed 0: done" in status()

    # The second run's file comes from another machine. A third machine sees both results.
    content = json.loads(part.read_text())
    content["runs"][0]["variant"] = second.variant
    part.with_name(f"{second.name}.json").write_text(json.dumps(content))
    assert queue("third machine", "--next") == 0
    assert "started" not in capsys.readouterr().out
    assert queue("third machine", "--merge") == 0
    assert not part.exists()
    rows = rows_of(results / "small" / "summary.json")
    assert [row["variant"] for row in rows] == ["base-steps=20", "base-lr=0.02"]
    assert "elsewhere" not in rows[1]["command"]


@slow
def test_a_stopped_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(trainings.TRAININGS, "small", small("shampoo-4 lr=0.02"))

    def run(folder: str, *more: str) -> int:
        out, results = str(tmp_path / folder), str(tmp_path / "results" / folder)
        return run_queue.main(
            ["small", "--data", "elsewhere", "--out", out, "--results", results, *more]
        )

    def content_of(folder: str) -> dict[str, Any]:
        path = tmp_path / "results" / folder / "small" / "summary.json"
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def has_checkpoint() -> bool:
        return any((tmp_path / "parts").glob("small/shampoo*/shampoo*/checkpoints/*"))

    # The time runs out as soon as there is a checkpoint.
    with monkeypatch.context() as patched:
        patched.setattr(processes.time, "monotonic", lambda: 1e9 if has_checkpoint() else 0.0)
        assert run("parts", "--seconds", "60", "--together", "2") == 1
    assert "stopped" in capsys.readouterr().out
    assert not (tmp_path / "results" / "parts").exists()
    assert run("parts", "--together", "1") == 0
    (row,) = content_of("parts")["runs"]
    assert row["curve"]["step"] == [40, 80]
    assert row["variant"] == "shampoo-4-lr=0.02"
    assert "elsewhere" not in row["command"]
    assert "seconds" not in row  # runs that shared the device have no times


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([], "--next"),
        (["--next"], "--data and --out"),
        (["no-such-table", "--status"], "no such table"),
    ):
        with pytest.raises(SystemExit):
            run_queue.main(words)
        assert message in capsys.readouterr().err
