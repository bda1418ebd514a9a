"""Checkpoints of earlier formats, damaged files, full disks, folders that cannot be written to."""

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
from conftest import relative_error, same_state, slow
from faults import interrupted_at
from networks import assert_same_state, tensors
from torch import nn

from kronbit import Shampoo
from kronbit.lab.errors import LabError
from kronbit.lab.training import checkpoints

ROOT = Path(__file__).parent
EVERY = {"update_every": 2, "refresh_every": 3}


def gradients(params: list[nn.Parameter], t: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))


@pytest.mark.parametrize("number", [1, 2])
def test_files_of_every_format_are_read_and_runs_go_on(number: int) -> None:
    """Written by the versions of their time, which also wrote down how their runs went on."""
    saved = torch.load(ROOT / "checkpoints" / f"format{number}.pt", weights_only=True)
    groups = saved["optimizer"]["param_groups"]
    assert groups[0]["kronbit_format"] == number
    params = [nn.Parameter(w.clone()) for w in saved["weights"]]
    written = {"method": "eigen", "storage": "paper"} if number == 1 else {}
    optimizer = Shampoo(params, lr=1.0, **written)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # F writes to it
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["kronbit_format"] == 2
    for t in range(5, 9):
        gradients(params, t)
        optimizer.step()
    for p, before, after in zip(params, saved["weights"], saved["after"], strict=True):
        # A code may be rounded otherwise; a root that was lost would turn the direction.
        assert relative_error(p.detach() - before, after - before) < 2e-2
    # And as what is the default today.
    params = [nn.Parameter(w.clone()) for w in saved["weights"]]
    today = Shampoo(params, lr=1.0)
    today.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for t in range(5, 9):
        gradients(params, t)
        today.step()
    for p, before, after in zip(params, saved["weights"], saved["after"], strict=True):
        assert relative_error(p.detach() - before, after - before) < 0.3


def small_run() -> tuple[list[nn.Parameter], Shampoo]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(66, 40)), nn.Parameter(torch.randn(7))]
    optimizer = Shampoo(params, lr=1e-2, **EVERY)
    for t in range(4):
        gradients(params, t)
        optimizer.step()
    return params, optimizer


def loads(path: Path, checked: bool) -> bool:
    """Whether a file loads; if not, an error leaves everything as it was."""
    params, optimizer = small_run()
    state = copy.deepcopy(optimizer.state_dict())
    try:
        content = checkpoints.read(path) if checked else torch.load(path, weights_only=True)
    except Exception as error:  # torch raises anything
        assert not checked or isinstance(error, LabError)  # noqa: PT017
        return False
    try:
        optimizer.load_state_dict(content["optimizer"])
    except ValueError:  # and nothing else
        assert_same_state(optimizer.state_dict()["state"], state["state"])
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]
        return False
    if checked:
        assert_same_state(optimizer.state_dict()["state"], state["state"])
    # A number may have become huge, such that F's step with it overflows: nobody can know.
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
def test_damaged_files_load_whole_or_not_at_all(count: int, checked: bool, tmp_path: Path) -> None:
    """With a bit flipped in any region of the file, or cut off there.

    The lab looks at the checksums, so that it sees every change of a number. Others may get a
    number that is wrong, but none that is no number, and never a part of a checkpoint.
    """
    _, optimizer = small_run()
    path = checkpoints.save(tmp_path, 4, {"optimizer": optimizer.state_dict()}, keep=1)
    good = path.read_bytes()
    draw = random.Random(0)
    cut_off = flipped = 0
    for region in range(count):
        first, last = len(good) * region // count, len(good) * (region + 1) // count - 1
        at = draw.randint(first, last)
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :])
        flipped += loads(path, checked)
        path.write_bytes(good[:at])
        cut_off += loads(path, checked)
    assert cut_off == 0
    assert flipped < count / 2 if checked else flipped > 0  # there is room between the records


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it has been run",)


@pytest.mark.parametrize("format", ["torch", "pickle"])
def test_no_code_of_a_checkpoint_is_run(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    path = place / "step-00000004.pt"
    content = {"format": 1, "step": 4, "model": Malicious()}
    if format == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(LabError, match="cannot read the checkpoint"):
        checkpoints.load_last(tmp_path / "run")
    assert not (tmp_path / "it has been run").exists()


def test_nothing_is_ever_unpickled_as_it_comes() -> None:
    """The only ways of ours to read a file that could hold code are those that run none."""
    sources = [*(ROOT.parent / "src").rglob("*.py"), *(ROOT.parent / "examples").glob("*.py")]
    calls = 0
    for path in [*sources, *(ROOT.parent / "benchmarks").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for call in text.split("torch.load(")[1:]:
            calls += 1
            assert "weights_only=True" in call[:200].split("\n\n")[0], path
        if path.name != "battery.py":  # it pickles and reads an optimizer of its own
            assert "pickle.load" not in text, path
        assert "allow_pickle=True" not in text, path
    assert calls >= 3


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error of the system's, as root may write anywhere."""
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


def test_ctrl_c_while_saving_leaves_the_last_one_whole(tmp_path: Path) -> None:
    """At every line: what stands under a checkpoint's name is the old one or the new one."""
    with interrupted_at(0) as lines:
        checkpoints.save(tmp_path / "count", 2, {"x": torch.ones(3)}, keep=2)
    for nth in range(1, lines[0] + 1):
        folder = tmp_path / str(nth)
        checkpoints.save(folder, 1, {"x": torch.zeros(3)}, keep=2)
        with interrupted_at(nth), pytest.raises(KeyboardInterrupt):
            checkpoints.save(folder, 2, {"x": torch.ones(3)}, keep=2)
        found = checkpoints.load_last(folder)
        assert torch.equal(found["x"], torch.full((3,), float(found["step"] - 1)))
        # The next one clears up what is left of it.
        checkpoints.save(folder, 3, {"x": torch.ones(3)}, keep=1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003.pt"]


def test_a_state_dict_is_read_while_ctrl_c_comes() -> None:
    """Taking one changes nothing, wherever it ends."""
    _, optimizer = small_run()
    before = copy.deepcopy(optimizer.state_dict())
    with interrupted_at(0) as lines:
        optimizer.state_dict()
    for nth in range(1, lines[0] + 1):
        with interrupted_at(nth), pytest.raises(KeyboardInterrupt):
            optimizer.state_dict()
        assert_same_state(optimizer.state_dict()["state"], before["state"])


def test_ctrl_c_while_loading_leaves_something_that_can_be_loaded_into() -> None:
    """Wherever it ends, loading once more gives what the checkpoint holds."""
    params, source = small_run()
    saved = copy.deepcopy(source.state_dict())
    gradients(params, 4)
    source.step()
    _, optimizer = small_run()
    again = copy.deepcopy(saved)
    with interrupted_at(0) as lines:
        optimizer.load_state_dict(again)
    for nth in random.Random(0).sample(range(1, lines[0]), 15):
        _, optimizer = small_run()
        again = copy.deepcopy(saved)
        with interrupted_at(nth), pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(again)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert same_state(optimizer.state_dict()["state"], saved["state"])
