"""Checkpoints of earlier formats, damaged files, and folders that are not writable."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import interrupted_at
from support.networks import assert_same_state, tensors
from support.numerics import relative_error, same_state, slow
from torch import nn

from kronbit import Shampoo
from kronbit.lab import checkpoints
from kronbit.lab.errors import LabError

ROOT = Path(__file__).parent
SCHEDULE = {"update_every": 2, "refresh_every": 3}


def gradients(params: list[nn.Parameter], t: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))


@pytest.mark.parametrize("number", [1, 2])
def test_runs_resume_from_files_of_every_format(number: int) -> None:
    """The files also hold the weights that the earlier versions reached after more steps."""
    saved = torch.load(ROOT / "checkpoints" / f"format{number}.pt", weights_only=True)
    groups = saved["optimizer"]["param_groups"]
    assert groups[0]["kronbit_format"] == number
    params = [nn.Parameter(w.clone()) for w in saved["weights"]]
    options = {"method": "eigen", "storage": "paper"} if number == 1 else {}
    optimizer = Shampoo(params, lr=1.0, **options)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # F writes to it
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["kronbit_format"] == 2
    for t in range(5, 9):
        gradients(params, t)
        optimizer.step()
    for p, before, after in zip(params, saved["weights"], saved["after"], strict=True):
        # Codes may be rounded differently, but a lost root would change the direction.
        assert relative_error(p.detach() - before, after - before) < 2e-2
    # The current defaults convert the state.
    params = [nn.Parameter(w.clone()) for w in saved["weights"]]
    converted = Shampoo(params, lr=1.0)
    converted.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for t in range(5, 9):
        gradients(params, t)
        converted.step()
    for p, before, after in zip(params, saved["weights"], saved["after"], strict=True):
        assert relative_error(p.detach() - before, after - before) < 0.3


def small_run() -> tuple[list[nn.Parameter], Shampoo]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(66, 40)), nn.Parameter(torch.randn(7))]
    optimizer = Shampoo(params, lr=1e-2, **SCHEDULE)
    for t in range(4):
        gradients(params, t)
        optimizer.step()
    return params, optimizer


def loads(path: Path, checked: bool) -> bool:
    """Return True if a file loads. Otherwise, check that the error changes nothing.

    ``checked`` reads it as the lab does, which verifies checksums.
    """
    params, optimizer = small_run()
    state = copy.deepcopy(optimizer.state_dict())
    try:
        content = checkpoints.read(path) if checked else torch.load(path, weights_only=True)
    except Exception as error:  # torch raises errors of many types
        assert not checked or isinstance(error, LabError)  # noqa: PT017
        return False
    try:
        optimizer.load_state_dict(content["optimizer"])
    except ValueError:  # other errors fail the test
        assert_same_state(optimizer.state_dict()["state"], state["state"])
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]
        return False
    if checked:
        assert_same_state(optimizer.state_dict()["state"], state["state"])
    # A changed number may be so large that F's step overflows, which loading cannot detect.
    loaded = tensors(optimizer.state_dict()["state"])
    huge = any(leaf.is_floating_point() and leaf.abs().max() > 1e30 for leaf in loaded.values())
    gradients(params, 4)
    optimizer.step()
    for name, leaf in tensors(optimizer.state_dict()["state"]).items():
        assert "base" in name or not leaf.is_floating_point() or torch.isfinite(leaf).all(), name
    assert huge or all(torch.isfinite(p).all() for p in params)
    return True


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=slow)])
def test_damaged_files_load_completely_or_not_at_all(
    count: int, checked: bool, tmp_path: Path
) -> None:
    """In every region, one bit of the file is flipped, or the file is truncated there.

    The lab verifies checksums, so it detects every changed number. Without checksums, a number may
    be wrong, but it is always finite, and a checkpoint is never loaded in part.
    """
    _, optimizer = small_run()
    path = checkpoints.save(tmp_path, 4, {"optimizer": optimizer.state_dict()}, keep=1)
    good = path.read_bytes()
    draw = random.Random(0)
    truncated = flipped = 0
    for region in range(count):
        first, last = len(good) * region // count, len(good) * (region + 1) // count - 1
        at = draw.randint(first, last)
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :])
        flipped += loads(path, checked)
        path.write_bytes(good[:at])
        truncated += loads(path, checked)
    assert truncated == 0
    assert flipped < count / 2 if checked else flipped > 0  # some bytes are padding


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it has been run",)


@pytest.mark.parametrize("format", ["torch", "pickle"])
def test_loading_a_checkpoint_runs_none_of_its_code(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    path = folder / "step-00000004.pt"
    content = {"format": 1, "step": 4, "model": Malicious()}
    if format == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(LabError, match="cannot read the checkpoint"):
        checkpoints.load_last(tmp_path / "run")
    assert not (tmp_path / "it has been run").exists()


def test_no_source_unpickles_untrusted_files() -> None:
    """Pickled files, which can contain code, are read only by functions that do not run it."""
    sources = [
        *(ROOT.parents[1] / "src").rglob("*.py"),
        *(ROOT.parents[1] / "examples").glob("*.py"),
    ]
    calls = 0
    for path in [*sources, *(ROOT.parents[1] / "benchmarks").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for call in text.split("torch.load(")[1:]:
            calls += 1
            assert "weights_only=True" in call[:200].split("\n\n")[0], path
        if path.name != "battery.py":  # it unpickles only what it has pickled
            assert "pickle.load" not in text, path
        assert "allow_pickle=True" not in text, path
    assert calls >= 3


def test_the_error_for_a_read_only_folder_names_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is simulated, because root may write to any folder."""
    checkpoints.save(tmp_path, 1, {"model": {}}, keep=2)
    real = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if "w" in str(args):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LabError, match=r"Read-only file system.*step-00000001.pt, is kept"):
        checkpoints.save(tmp_path, 2, {"model": {}}, keep=2)
    assert checkpoints.load_last(tmp_path)["step"] == 1


def test_ctrl_c_while_saving_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """After Ctrl-C at any line, the last checkpoint is either the old one or the new one."""
    with interrupted_at(0) as lines:
        checkpoints.save(tmp_path / "count", 2, {"x": torch.ones(3)}, keep=2)
    for nth in range(1, lines[0] + 1):
        folder = tmp_path / str(nth)
        checkpoints.save(folder, 1, {"x": torch.zeros(3)}, keep=2)
        with interrupted_at(nth), pytest.raises(KeyboardInterrupt):
            checkpoints.save(folder, 2, {"x": torch.ones(3)}, keep=2)
        last = checkpoints.load_last(folder)
        assert torch.equal(last["x"], torch.full((3,), float(last["step"] - 1)))
        # The next save removes what the interrupted one left behind.
        checkpoints.save(folder, 3, {"x": torch.ones(3)}, keep=1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003.pt"]


def test_ctrl_c_in_state_dict_changes_nothing() -> None:
    _, optimizer = small_run()
    before = copy.deepcopy(optimizer.state_dict())
    with interrupted_at(0) as lines:
        optimizer.state_dict()
    for nth in range(1, lines[0] + 1):
        with interrupted_at(nth), pytest.raises(KeyboardInterrupt):
            optimizer.state_dict()
        assert_same_state(optimizer.state_dict()["state"], before["state"])


def test_loading_can_be_repeated_after_ctrl_c() -> None:
    """After Ctrl-C at any line, loading again gives the state of the checkpoint."""
    params, source = small_run()
    saved = copy.deepcopy(source.state_dict())
    gradients(params, 4)
    source.step()
    _, optimizer = small_run()
    content = copy.deepcopy(saved)
    with interrupted_at(0) as lines:
        optimizer.load_state_dict(content)
    for nth in random.Random(0).sample(range(1, lines[0]), 15):
        _, optimizer = small_run()
        content = copy.deepcopy(saved)
        with interrupted_at(nth), pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(content)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert same_state(optimizer.state_dict()["state"], saved["state"])
