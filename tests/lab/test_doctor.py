"""The doctor passes kronbit's optimizers and reports the fault of each broken one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from kronbit import KFAC, Shampoo, cli
from kronbit.lab.doctor.battery import CHECKS, examine
from kronbit.lab.doctor.subject import Subject, subject_of

CPU = torch.device("cpu")
FSDP2 = "FSDP2 on two ranks is one process"


def assert_passes(name: str, check: str, device: torch.device) -> None:
    problem = examine(subject_of(f"kronbit.{name}", {}), device, check)
    if check == FSDP2 and name in ("KFAC", "AdaBK"):
        assert "only Shampoo and CASPR support sharded parameters" in problem
    else:
        assert problem == ""


@pytest.mark.parametrize("name", ["Shampoo", "KFAC"])
@pytest.mark.parametrize("check", CHECKS)
def test_our_optimizers_pass(check: str, name: str) -> None:
    assert_passes(name, check, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Shampoo", "CASPR", "KFAC", "AdaBK"])
@pytest.mark.parametrize("check", CHECKS)
def test_our_optimizers_pass_on_a_gpu(check: str, name: str) -> None:
    assert_passes(name, check, torch.device("cuda"))


class LosesRoots(Shampoo):
    """A user's optimizer that loses its roots when a checkpoint is loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        fresh = {
            key: {"step": entry["step"], "base": entry["base"]}
            for key, entry in state_dict["state"].items()
        }
        for group in self.param_groups:
            group["precondition"] = False
        super().load_state_dict({**state_dict, "state": fresh})


class Derived(KFAC):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


def test_subclasses_of_kfac_get_the_model() -> None:
    subject = subject_of(f"{Derived.__module__}.Derived", {})
    assert examine(subject, CPU, "resume to the bit") == ""


def test_subclasses_are_checked_with_second_order_steps() -> None:
    subject = subject_of(f"{LosesRoots.__module__}.LosesRoots", {})
    assert "differs by up to" in examine(subject, CPU, "resume to the bit")


def test_a_package_in_the_working_directory_is_imported(
    few_checks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package_of_a_user.py").write_text("from kronbit import CASPR as Renamed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.run(["doctor", "-o", "package_of_a_user.Renamed", "--device", "cpu"]) == 0


class NoClosure(SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(None)


class LosesState(SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class RoundsState(SGD):
    """Keeps float32 state, which torch casts to the dtype of bf16 parameters on loading."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            exact = self.state[p].get("exact", p).float() - 1e-3 * p.grad.float()
            self.state[p]["exact"] = exact
            p.copy_(exact)


class KeepsObjects(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "config": KeepsObjects}


class ReadsGroupsOnce(SGD):
    """Reads the groups only when it is constructed."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.rates = [group["lr"] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        for group, lr in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = lr
        return super().step(closure)


class MatricesOnly(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError("takes matrices only")
        return super().step(closure)


class Unpicklable(SGD):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


class IgnoresLearningRate(SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(1e-3)
        return loss


class Float32Only(SGD):
    def step(self, closure: Any = None) -> Any:
        if any(p.dtype != torch.float32 for group in self.param_groups for p in group["params"]):
            raise TypeError("takes float32 only")
        return super().step(closure)


class DividesByLocalRows(SGD):
    """Treats the local shard of a matrix as the whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            local.div_(local.shape[0])
        return super().step(closure)


BROKEN: list[tuple[type, str, str]] = [
    (Float32Only, "bf16 parameters train", "takes float32 only"),
    (LosesState, "torch.distributed.checkpoint round trip", "differs by up to"),
    (DividesByLocalRows, "FSDP2 on two ranks is one process", "differs from one process by up to"),
    (NoClosure, "closure called once, its loss returned", "called 0 times"),
    (LosesState, "resume to the bit", "differs by up to"),
    (RoundsState, "resume to the bit, bf16 parameters", "differs by up to"),
    (KeepsObjects, "torch.load(weights_only=True)", "UnpicklingError"),
    (ReadsGroupsOnce, 'group["lr"] = float', "differs by up to"),
    (ReadsGroupsOnce, "add_param_group after a step", "ValueError"),
    (MatricesOnly, "parameters of any shape, empty ones", "takes matrices only"),
    (Unpicklable, "pickle", "cannot pickle this"),
    (IgnoresLearningRate, "first step with zero gradients and lr=0", "differs by up to"),
    (SGD, "a NaN gradient leaves parameters finite", "not finite"),
]


@pytest.mark.parametrize(("kind", "check", "message"), BROKEN)
def test_each_fault_is_reported(kind: type, check: str, message: str) -> None:
    subject = Subject(f"{kind.__module__}.{kind.__name__}", {"lr": 0.1, "momentum": 0.9})
    assert subject.find() is kind
    assert message in examine(subject, CPU, check)


def test_every_check_can_fail() -> None:
    assert {check for _, check, _ in BROKEN} == CHECKS.keys()


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., None]]:
    some = dict(list(CHECKS.items())[:2])
    monkeypatch.setattr("kronbit.lab.doctor.battery.CHECKS", some)
    return some


def test_the_command_shows_versions_and_findings(
    few_checks: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "transformers" in output
    assert "bf16 parameters train: ok" in output
    path = f"{NoClosure.__module__}.NoClosure"
    assert cli.run(["doctor", "-o", path, "--options", "lr=0.1", "--json", "--device", "cpu"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["checks"]["closure called once, its loss returned"] == (
        "the closure was called 0 times"
    )
    assert report["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "kronbit.Shampo"], "cannot import 'kronbit.Shampo'"),
        (["--options", "bits"], "--options: options must be like"),
    ],
)
def test_bad_input_gives_a_one_line_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
