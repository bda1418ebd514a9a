"""The command, as users call it: its output, its errors and the files that it writes."""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.numerics import same_state, slow
from support.ranks import run_script_on_ranks

from kronbit.cli import run
from kronbit.cli.options import output_folder
from kronbit.lab import checkpoints
from kronbit.lab.recipe import recipe_names

SMALL = ["--set", "steps=40", "--set", "batch=20", "--set", "eval_every=20"]
SMALL += ["--set", "model.width=8"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kronbit", *arguments]


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with a one-line error, and return the error."""
    assert run(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("kronbit: error: ")
    assert error.count("\n") == 1
    return error


def state(folder: Path) -> dict[str, Any]:
    checkpoint = checkpoints.load_last(folder)
    return {name: checkpoint[name] for name in ("step", "model", "optimizer")}


def wait_for_checkpoint(folder: Path, after: str = "") -> str:
    """Return the name of the first checkpoint that is newer than ``after``."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        names = [path.stem for path in checkpoints.checkpoints(folder)]
        if names and names[-1] > after:
            return names[-1]
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint in {folder} after {after!r}")


def test_a_killed_and_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """The run is killed, resumed, interrupted and resumed. The results are bit-identical."""
    given = ["train", "digits-cnn", "--bits", "4", "--set", "steps=100", "--set", "batch=20"]
    given += ["--set", "checkpoint_every=4", "--set", "eval_every=50", "--set", "model.width=8"]
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    process = subprocess.Popen(command(*given, "--out", str(parts)))
    wait_for_checkpoint(parts)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed_at = wait_for_checkpoint(parts)
    assert killed_at < "step-00000100"

    resume = command("train", "--resume", str(parts))
    process = subprocess.Popen(resume, stderr=subprocess.PIPE, text=True)
    wait_for_checkpoint(parts, killed_at)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"resume with: kronbit train --resume {parts}" in errors
    assert killed_at < wait_for_checkpoint(parts) < "step-00000100"

    assert run(["train", "--resume", str(parts)]) == 0
    assert run([*given, "--out", str(whole)]) == 0
    assert same_state(state(parts), state(whole))
    actual, expected = (json.loads((out / "summary.json").read_text()) for out in (parts, whole))
    for key in ("loss", "accuracy", "steps", "best_loss", "errors"):
        assert actual[key] == expected[key]


@slow
def test_torchrun_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks use one folder and shard the state. After a stop they resume exactly."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--standalone", "-m", "kronbit", "train", "--parallel", "ddp"]
    given = ["digits-vit", "--set", "steps=8", "--set", "batch=20", "--set", "model.depth=1"]
    given += ["--set", "checkpoint_every=4", "--set", "shard_state=true", "--set", "eval_every=8"]
    subprocess.run([*torchrun, *given], cwd=tmp_path, check=True, timeout=120)
    (folder,) = (tmp_path / "runs").iterdir()
    whole = state(folder)
    checkpoints.checkpoints(folder)[-1].unlink()
    run_script_on_ranks(2, "kronbit", "train", "--parallel", "ddp", "--resume", str(folder))
    assert state(folder)["step"] == 8
    assert same_state(state(folder), whole)


def test_a_clock_that_goes_back_does_not_overwrite_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run starts at the same second as the first; then the clock goes back."""

    class Clock(dt.datetime):
        years = [2026, 2026, 1999]  # noqa: RUF012

        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(cls.years.pop(0) if cls.years else 1980, 1, 1, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dt, "datetime", Clock)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    given = ["train", "digits-cnn", *SMALL[:4], "--set", "steps=4", "--set", "model.width=8"]
    stem = "digits-cnn-shampoo-20260101-000000"
    assert run(given) == 0
    first = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    Clock.years = [2026, 1999]
    assert run([*given, "--set", "lr=0.1"]) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {stem, f"{stem}-2"}
    assert all(path.read_bytes() == content for path, content in first.items())
    summary = json.loads((tmp_path / "runs" / f"{stem}-2" / "summary.json").read_text())
    assert summary["seconds"] > 0


def test_runs_started_in_the_same_second_get_separate_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that writes nothing leaves no folder."""
    monkeypatch.chdir(tmp_path)
    clock = mock.Mock(**{"now.return_value": dt.datetime(2026, 1, 1, 12)})
    monkeypatch.setattr(dt, "datetime", clock)
    with ThreadPoolExecutor(8) as threads, ExitStack() as open_folders:
        contexts = [output_folder(None, "digits") for _ in range(20)]
        folders = list(threads.map(open_folders.enter_context, contexts))
        assert len(set(folders)) == 20
        (folders[3] / "run.json").touch()
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / folders[3]]


def test_an_unwritable_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "unmounted", Path("/proc")):
        (tmp_path / "runs").symlink_to(place)
        assert "cannot write to runs" in one_line(capsys, "train", "digits-cnn", *SMALL)
        (tmp_path / "runs").unlink()


def on_terminal(columns: int, *arguments: str) -> str:
    """Return the output of a command on a terminal of this width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "CI"):
        environment.pop(name, None)
    process = subprocess.Popen(
        command(*arguments),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    os.close(follower)
    output = b""
    while True:
        ready, _, _ = select.select([leader], [], [], 120)
        try:
            piece = os.read(leader, 65536) if ready else b""
        except OSError:  # the process has closed the terminal
            piece = b""
        if not piece:
            break
        output += piece
    os.close(leader)
    assert process.wait() == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("columns", [pytest.param(60, marks=slow), 140])
def test_a_terminal_shows_a_progress_bar(columns: int, tmp_path: Path) -> None:
    output = on_terminal(columns, "train", "digits-cnn", *SMALL, "--out", str(tmp_path / "run"))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert "━" in plain
    assert "40/40" in plain
    assert re.search(r"loss \d", plain)
    assert ("it/s" in plain) == (columns == 140)
    assert ("ETA" in plain) == (columns == 140)
    for line in re.split(r"[\r\n]+", plain):
        if "━" in line or "─" in line:
            assert len(line.rstrip()) <= columns
    assert "held-out loss" not in plain  # log lines replace the bar only outside a terminal


def test_compare_writes_runs_figures_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    given = ["digits-cnn", *SMALL, "-o", "base", "-o", "shampoo-4", "-o", "kfac-32 lr=0.01"]
    assert run(["compare", *given, "--out", str(folder), "--seeds", "2"]) == 0
    table = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["runs"]) == 6
    for entry in summary["runs"]:
        run_folder = folder / entry["folder"]
        assert json.loads((run_folder / "summary.json").read_text()).items() <= entry.items()
        kinds = {
            json.loads(line)["kind"]
            for line in (run_folder / "metrics.jsonl").read_text().splitlines()
        }
        assert kinds == {"train", "eval"} | (
            {"errors"} if entry["variant"] == "shampoo-4" else set()
        )
        assert entry["command"].startswith("kronbit train digits-cnn")
    assert "SGDM" in table
    assert "+ 4-bit Shampoo" in table
    assert len(list(folder.glob("*.png"))) >= 6
    page = (folder / "report.html").read_text()
    # A second report has the same numbers.
    assert run(["report", str(folder), "--out", str(tmp_path / "again")]) == 0
    again = (tmp_path / "again" / "report.html").read_text()
    values = re.compile(r'data-value="([^"]*)"')
    assert values.findall(page) == values.findall(again)
    assert "several runs are merged" in one_line(capsys, "report", str(folder), str(folder))


def test_the_default_comparison_has_five_variants(tmp_path: Path) -> None:
    short = ["--set", "steps=6", "--set", "batch=4", "--set", "eval_batches=2"]
    short += ["--set", "eval_every=3", "--set", "first_refresh=3", "--set", "model.n_layer=1"]
    assert run(["compare", *short, "--out", str(tmp_path / "runs")]) == 0
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert summary["recipe"] == "pydoc-gpt"
    state_bytes = {}
    for entry in summary["runs"]:
        state_bytes[entry["variant"]] = entry["memory"]["statistics"] + entry["memory"]["roots"]
    names = ["base", "shampoo-32", "shampoo-4-naive", "shampoo-4-paper", "shampoo-4"]
    assert list(state_bytes) == names
    assert state_bytes["shampoo-32"] > 13 * state_bytes["shampoo-4"]


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["recipes"]) == 0
    listed = capsys.readouterr().out
    for name in recipe_names():
        assert name in listed
    assert "Table 2" in listed
    assert run(["recipes", "show", "digits-cnn"]) == 0
    recipe_file = tmp_path / "user.yaml"
    recipe_file.write_text(capsys.readouterr().out.replace("epochs: 20.0", "epochs: 1.0"))
    assert run(["train", str(recipe_file), "--out", str(tmp_path / "run"), "--tensorboard"]) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 14


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "compare", "recipes", "plan", "errors", "report"):
        assert run([name, "--help"]) == 0
        assert "Example" in capsys.readouterr().out, name
    assert run(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kronbit ")
    assert run(["train", "--no-such-option"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run(["no-such-command"]) == 2


def test_help_imports_no_heavy_modules() -> None:
    """Help loads neither optional packages nor the modules of subcommands."""
    heavy = {"transformers", "matplotlib", "sklearn", "timm", "torchvision", "datasets"}
    heavy |= {f"kronbit.lab.{room}" for room in ("training.loop", "models", "plan", "report")}
    script = f"import sys, kronbit.cli; sys.exit(str({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == "set()\n"


def test_every_bad_input_gives_a_one_line_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert "nearest: pydoc-gpt" in one_line(capsys, "train", "pydoc-gtp", *out)
    assert "no recipe given" in one_line(capsys, "train", *out)
    missing = ["--data", str(tmp_path)]
    assert "cs.toronto.edu" in one_line(capsys, "train", "cifar100-vgg19", *missing, *out)
    if not torch.cuda.is_available():
        assert "no CUDA device" in one_line(capsys, "train", "digits-cnn", "--device", "cuda", *out)
    assert "needs torchrun" in one_line(capsys, "train", "digits-cnn", "--parallel", "ddp", *out)
    assert "not optimizer" in one_line(capsys, "train", "digits-cnn", "--optimizer", "x", *out)
    assert "bits" in one_line(capsys, "train", "digits-cnn", "--bits", "5", *out)
    assert "'x' is not an optimizer" in one_line(capsys, "compare", "digits-cnn", "-o", "x", *out)
    late = ["compare", "digits-cnn", "-o", "base", "-o", "shampoo-4 first_refresh=9999", *out]
    assert "first_refresh must be below" in one_line(capsys, *late)  # before the first run
    late = ["compare", "digits-cnn", "-o", "base", "-o", "kfac-4", "--compile", *out]
    assert "--compile skips the hooks" in one_line(capsys, *late)
    for first_order in ("base", "muon"):
        spec = f"{first_order} bits=8"
        assert "bits is not an option of" in one_line(
            capsys, "compare", "digits-vit", "-o", spec, *out
        )
    assert "run.json" in one_line(capsys, "train", "--resume", str(tmp_path))
    resumed = ["train", "--resume", str(tmp_path), "--bits", "4"]
    assert "give no others" in one_line(capsys, *resumed)
    plain = ["train", "digits-cnn", "--optimizer", "base", "--bits", "4", *out]
    assert "is not an option of base" in one_line(capsys, *plain)
    longer = ["train", "pydoc-gpt", "--set", "data.length=128", *out]
    assert "exceeds the 64 positions" in one_line(capsys, *longer)
    assert "--set data.NAME=VALUE" in one_line(capsys, "train", "digits-cnn", "--set", "data=3")
    assert "--bits must be" in one_line(capsys, "errors", "--bits", "5")
    assert not (tmp_path / "run").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    full = str(tmp_path / "full")
    assert "is not empty" in one_line(capsys, "train", "digits-cnn", "--out", full)
    file = str(tmp_path / "full" / "file")
    assert "is a file" in one_line(capsys, "train", "digits-cnn", "--out", file)
    below = f"{file}/run"
    assert "cannot write to" in one_line(capsys, "train", "digits-cnn", *SMALL, "--out", below)
    assert "no run" in one_line(capsys, "report", full)


def test_the_command_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    from kronbit.__main__ import main

    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "typer" else real(name))
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'kronbit\[lab\]'"):
        main()
