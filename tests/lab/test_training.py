"""The training loop equals a hand-written loop and resumes exactly after every interruption."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.cifar import write_cifar
from support.numerics import same_state, slow
from support.ranks import run_on_ranks
from torch import nn
from torch.nn import functional

from kronbit import Shampoo
from kronbit.lab import checkpoints
from kronbit.lab.data import Setting, open_data
from kronbit.lab.errors import LabError
from kronbit.lab.models import build
from kronbit.lab.recipe import Recipe, find_recipe, parse_settings
from kronbit.lab.training.experiment import make_trial, run_all, run_trial, train_command
from kronbit.lab.training.loop import Interrupted, Training
from kronbit.lab.training.terminal import Terminal
from kronbit.lab.training.world import World

CPU = World("none", torch.device("cpu"))
QUIET = Console(file=open(os.devnull, "w"))  # noqa: SIM115


def small(*settings: str) -> Recipe:
    given = ["steps=12", "batch=20", "log_every=5", "eval_every=6", "model.width=8", *settings]
    return find_recipe("digits-cnn").with_settings(parse_settings(given))


def trained(recipe: Recipe, folder: Path, world: World = CPU, resume: bool = False) -> Training:
    training = Training(recipe, folder, world)
    folder.mkdir(exist_ok=True)
    with Terminal(QUIET) as terminal:
        training.run(terminal, "test", resume)
    return training


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in records if line["kind"] == kind]


def train_losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder, "train")]


@pytest.mark.parametrize("bits", [None, 4])
def test_the_loop_equals_a_handwritten_loop(bits: int | None, tmp_path: Path) -> None:
    recipe = small(*(["optimizer=base"] if bits is None else ["bits=4"]), "clip=0.5")
    training = trained(recipe, tmp_path / "run")

    data = open_data(recipe.data, Setting(Path("data"), 20, 0, torch.device("cpu")))
    torch.manual_seed(0)
    model = build("digits-cnn", width=8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    if bits is not None:
        optimizer = Shampoo(optimizer, bits=4, **recipe.shampoo)
    losses = []
    for step in range(12):
        for group in optimizer.param_groups:
            rise, left = (step + 1) / 1, 1 - (step - 1) / 11
            cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (1 - left), dtype=torch.float64)))
            group["lr"] = 0.05 * (rise if step < 1 else float(cosine))
        x, y = data.batch(step)
        loss = functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())

    for (name, actual), expected in zip(
        training.model.state_dict().items(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5, msg=name)
    written = [line["loss"] for line in lines(tmp_path / "run", "train")]
    means = [sum(part) / len(part) for part in (losses[:5], losses[5:6], losses[6:10], losses[10:])]
    assert written == pytest.approx(means, rel=1e-6)
    with torch.no_grad():
        model.eval()
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.held_out())
    assert lines(tmp_path / "run", "eval")[-1]["accuracy"] == right / 397


def test_the_held_out_part_of_the_training_set_is_evaluated(tmp_path: Path) -> None:
    training = trained(small("optimizer=base", "holdout=0.1", "epochs=1"), tmp_path / "run")
    images, labels = training.data._test_images, training.data._test_labels  # type: ignore[attr-defined]
    assert training.steps == (1400 - len(labels)) // 20
    assert 130 <= len(labels) <= 150
    x, y = next(training.data.held_out())
    assert (len(x), y.tolist()) == (len(images), labels.tolist())
    training.model.eval()
    with torch.no_grad():
        right = int((training.model(x).argmax(1) == y).sum())
    assert lines(tmp_path / "run", "eval")[-1]["accuracy"] == right / len(labels)


@pytest.mark.parametrize(
    "optimizer",
    ["shampoo", "kfac", *(pytest.param(name, marks=slow) for name in ("base", "eva", "mfac"))],
)
def test_a_run_resumes_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    recipe = small(f"optimizer={optimizer}", "checkpoint_every=6", "keep=5", "eval_every=4")
    trained(recipe, tmp_path / "whole")
    trained(recipe, tmp_path / "parts")
    checkpoints.checkpoints(tmp_path / "parts")[-1].unlink()  # as if it crashed after step 6
    (tmp_path / "parts" / "metrics.jsonl").open("a").write('{"kind": "tr')  # half a line
    trained(recipe, tmp_path / "parts", resume=True)
    resumed, expected = (checkpoints.load_last(tmp_path / name) for name in ("parts", "whole"))
    assert resumed["step"] == expected["step"] == 12
    for name in ("model", "optimizer", "shadow"):
        assert same_state(resumed[name], expected[name]), name
    for kind in ("train", "eval", "errors"):
        timed = ("seconds", "step_ms")
        both = [
            [{k: v for k, v in line.items() if k not in timed} for line in lines(folder, kind)]
            for folder in (tmp_path / "parts", tmp_path / "whole")
        ]
        assert both[0] == both[1]
    assert lines(tmp_path / "whole", "errors") or optimizer != "shampoo"


def test_micro_batches_sum_up_to_the_batch(tmp_path: Path) -> None:
    # This network has no batch norm, which would normalise each part by its own statistics.
    given = ["steps=5", "batch=20", "eval_every=5"]
    recipe = find_recipe("digits-vit").with_settings(parse_settings(given))
    whole = trained(recipe, tmp_path / "whole")
    parts = trained(recipe.with_settings({"micro_batch": 8}), tmp_path / "parts")
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    losses = [lines(tmp_path / name, "train")[0]["loss"] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_schedule_free_evaluates_averaged_weights(tmp_path: Path) -> None:
    recipe = small(
        "base=schedulefree-sgd", "schedule=schedule-free", "optimizer=base", "lr=1.0", "steps=40"
    )
    training = trained(recipe, tmp_path / "run")
    optimizer: Any = training.optimizer
    assert optimizer.param_groups[0]["train_mode"]
    assert optimizer.param_groups[0]["warmup_steps"] == 4
    x, y = next(training.data.held_out())
    with training.evaluation_mode():
        averaged = training.objective.judge(training.model, x, y)[0] / len(y)
    training.model.eval()
    last = training.objective.judge(training.model, x, y)[0] / len(y)
    reported = lines(tmp_path / "run", "eval")[-1]["loss"]
    assert averaged.item() == pytest.approx(reported, rel=1e-5)
    assert last.item() != pytest.approx(reported, rel=1e-4)


def test_a_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small("checkpoint_every=6")
    real = os.fsync
    calls = []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LabError, match=r"No space left.*step-00000006.pt, is kept"):
            trained(recipe, tmp_path / "run")
    (last_checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoints.read(last_checkpoint)["step"] == 6

    # The disk fills up while torch writes: no file of this process may grow beyond 10,000 bytes.
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(LabError, match=r"File too large.*step-00000006.pt, is kept"):
            checkpoints.save(tmp_path / "run", 9, {"model": torch.zeros(100_000)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [last_checkpoint]


def test_a_network_learns(tmp_path: Path) -> None:
    recipe = find_recipe("digits-cnn").with_settings(parse_settings(["steps=60", "model.width=16"]))
    recipe = recipe.with_settings({"base": "adamw", "lr": 3e-3, "base_options.weight_decay": 0.01})
    trained(recipe, tmp_path / "run")
    assert lines(tmp_path / "run", "eval")[-1]["accuracy"] > 0.8


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    trained(small("checkpoint_every=3", "keep=2"), tmp_path / "run")
    assert [path.stem for path in checkpoints.checkpoints(tmp_path / "run")] == [
        "step-00000009",
        "step-00000012",
    ]


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    recipe = small("checkpoint_every=6")
    trained(recipe, tmp_path / "run")
    newest = checkpoints.checkpoints(tmp_path / "run")[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(LabError, match="remove it to resume"):
        trained(recipe, tmp_path / "run", resume=True)
    newest.unlink()
    assert trained(recipe, tmp_path / "run", resume=True).step == 12
    with pytest.raises(LabError, match="has no checkpoint"):
        trained(recipe, tmp_path / "empty", resume=True)


def test_a_comparison_resumes_with_its_missing_runs(tmp_path: Path) -> None:
    recipe = small("steps=4")
    trials = [make_trial(spec, recipe, "digits-cnn", CPU) for spec in ("base", "shampoo-4")]
    with Terminal(QUIET) as terminal:
        first = run_trial(trials[0], tmp_path / "base-seed0", CPU, terminal, False)
        runs = run_all(trials, tmp_path, CPU, terminal, True)
        assert [run.pop("folder") for run in runs] == ["base-seed0", "shampoo-4-seed0"]
        assert runs[0] == json.loads(json.dumps(first))  # not run again: the times are the same
        other = replace(make_trial("base lr=0.1", recipe, "digits-cnn", CPU), key="base")
        with pytest.raises(LabError, match="other settings"):
            run_all([other], tmp_path, CPU, terminal, True)
    memory = runs[1]["memory"]
    assert memory["statistics"] > 0
    assert memory["gradients"] == memory["parameters"]
    assert memory["peak"] is None or memory["peak"] >= 0


class InterruptedTerminal(Terminal):
    """Reports Ctrl-C after the first step."""

    def step(self, step: int) -> None:
        self.interrupted = True


def test_an_interrupted_comparison_resumes(tmp_path: Path) -> None:
    trials = [make_trial(spec, small(), "digits-cnn", CPU) for spec in ("base", "shampoo-4")]
    with pytest.raises(Interrupted), InterruptedTerminal(QUIET) as terminal:
        run_all(trials, tmp_path / "parts", CPU, terminal, True)
    (first_run,) = (tmp_path / "parts").iterdir()  # the second run has not started
    assert checkpoints.load_last(first_run)["step"] == 1
    with Terminal(QUIET) as terminal:
        run_all(trials, tmp_path / "parts", CPU, terminal, True)
        run_all(trials, tmp_path / "whole", CPU, terminal, False)
    for name in ("base-seed0", "shampoo-4-seed0"):
        resumed, expected = (
            checkpoints.load_last(tmp_path / folder / name) for folder in ("parts", "whole")
        )
        assert same_state(resumed["model"], expected["model"])
        assert same_state(resumed["optimizer"], expected["optimizer"])


def test_commands_reproduce_the_run() -> None:
    import shlex

    recipe = find_recipe("pydoc-gpt").with_settings(
        {"lr": 0.01, "clip": None, "betas": [0.9, 0.99]}
    )
    for spec in (
        "base longer=1.5",
        "shampoo-4-paper beta=0.9",
        "kfac-4 model.n_layer=1",
        "base holdout=0.1",
    ):
        made = make_trial(spec, recipe, "pydoc-gpt", CPU)
        words = shlex.split(made.command)
        assert words[:3] == ["kronbit", "train", "pydoc-gpt"]
        given: dict[str, Any] = {}
        while words[3:]:
            flag, value = words[3:5]
            given |= parse_settings([value if flag == "--set" else f"{flag[2:]}={value}"])
            del words[3:5]
        assert find_recipe("pydoc-gpt").with_settings(given) == made.recipe
    assert train_command(find_recipe("pydoc-gpt"), "pydoc-gpt", CPU) == "kronbit train pydoc-gpt"


def train_on_ranks(rank: int, folder: str) -> None:
    """Train on a rank with DDP and with FSDP2."""
    for parallel in ("ddp", "fsdp2"):
        world = World(parallel, torch.device("cpu"), rank, 2)
        trained(transformer(), Path(folder) / parallel, world)


def transformer() -> Recipe:
    """Return a recipe without crops, which differ by rank, and without quantisation."""
    given = ["steps=8", "batch=20", "log_every=2", "bits=32", "checkpoint_every=4", "eval_every=4"]
    return find_recipe("digits-vit").with_settings(
        parse_settings([*given, "keep=9", "model.depth=1", "data.crop=0"])
    )


def test_ranks_train_like_one_process(tmp_path: Path) -> None:
    """One process can also resume from the checkpoints of two ranks."""

    def losses(name: str) -> list[float]:
        values = [
            line["loss"] for kind in ("train", "eval") for line in lines(tmp_path / name, kind)
        ]
        assert len(values) == 8 / 2 + 8 / 4
        return values

    trained(transformer(), tmp_path / "one")
    run_on_ranks(2, train_on_ranks, str(tmp_path))
    for name in ("ddp", "fsdp2"):
        assert losses(name) == pytest.approx(losses("one"), rel=1e-3)
        checkpoints.checkpoints(tmp_path / name)[-1].unlink()
        trained(transformer(), tmp_path / name, resume=True)
        assert losses(name) == pytest.approx(losses("one"), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "how", "message"),
    [
        (["amp=fp16"], {}, "--amp fp16 needs a GPU"),
        ([], {"graph": True}, "--cuda-graph needs a CUDA device"),
        (["model.classes=3"], {}, "model.classes=10"),
        (["model.width=x"], {}, "model 'digits-cnn' cannot be built"),
        (["optimizer=kfac"], {"compile": True}, "--compile skips the hooks"),
        (["batch=5000"], {}, "larger than the 1400 training images"),
    ],
)
def test_invalid_runs_are_refused_before_anything_is_written(
    settings: list[str], how: dict[str, bool], message: str, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    recipe = small(*settings)
    world = World("none", torch.device("cpu"), **how)  # type: ignore[arg-type]
    invalid = make_trial(recipe.optimizer, recipe, "digits-cnn", world)
    with Terminal(QUIET) as terminal, pytest.raises(LabError, match=message):
        run_trial(invalid, tmp_path / "run", world, terminal, False)
    assert not (tmp_path / "run").exists()


def test_schedule_free_updates_batch_norm_for_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def network(name: str, **options: Any) -> nn.Module:
        head = nn.Linear(64 * 4, 10)
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), head)

    monkeypatch.setattr("kronbit.lab.training.loop.build", network)
    recipe = small("base=schedulefree-sgd", "schedule=schedule-free", "optimizer=base", "lr=1.0")
    training = trained(recipe, tmp_path / "run")
    norm: Any = training.model[1]
    before = norm.running_mean.clone()
    with training.evaluation_mode():
        # Means of the convolution's output with the averaged weights, over the next batches.
        with torch.no_grad():
            seen = [
                training.model[0](training.data.batch(12 + i)[0]).mean((0, 2, 3)) for i in range(50)
            ]
        expected = before
        for mean in seen:
            expected = 0.9 * expected + 0.1 * mean
        torch.testing.assert_close(norm.running_mean, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(norm.running_mean, before)


# --------------------------------------------------------------------------------------- on a GPU


def on_gpu(
    settings: list[str],
    folder: Path,
    name: str = "swin-tiny",
    resume: bool = False,
    graph: bool = False,
) -> Training:
    """Train briefly on random images."""
    images = folder.parent / "data"
    if not images.exists():
        write_cifar(images, 400)
    given = ["steps=12", "log_every=4", "eval_every=6", "checkpoint_every=6", "keep=9", "batch=40"]
    given += ["first_refresh=2", "update_every=3", "refresh_every=3", "watched_blocks=1"]
    recipe = find_recipe(f"cifar100-{name}").with_settings(parse_settings([*given, *settings]))
    world = World("none", torch.device("cuda"), data=images, graph=graph)
    training = Training(recipe, folder, world)
    folder.mkdir(exist_ok=True)
    with Terminal(QUIET) as terminal:
        training.run(terminal, "test", resume)
    return training


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["swin-tiny", "resnet34", "vgg19", "vit-small"])
def test_a_run_on_a_gpu_resumes_bit_for_bit(
    name: str, amp: str, graph: bool, tmp_path: Path
) -> None:
    transformer_settings = ["model.drop_path=0.1"] if name in ("swin-tiny", "vit-small") else []
    settings = [f"amp={amp}", *transformer_settings]
    if graph and amp == "fp16":
        with pytest.raises(LabError, match="fp16"):
            on_gpu(settings, tmp_path / "whole", name, graph=graph)
        return
    on_gpu(settings, tmp_path / "whole", name, graph=graph)
    on_gpu(settings, tmp_path / "parts", name, graph=graph)
    checkpoints.checkpoints(tmp_path / "parts")[-1].unlink()
    on_gpu(settings, tmp_path / "parts", name, resume=True, graph=graph)
    resumed, expected = (checkpoints.load_last(tmp_path / name) for name in ("parts", "whole"))
    for name in ("model", "optimizer", "scaler", "shadow"):
        assert same_state(resumed[name], expected[name]), name


@pytest.mark.gpu
def test_a_graph_trains_like_eager_steps(tmp_path: Path) -> None:
    eager, graph = (
        on_gpu(["optimizer=base"], tmp_path / name, graph=name == "graph").peak.bytes
        for name in ("eager", "graph")
    )
    losses = [
        [line["loss"] for line in lines(tmp_path / name, "train")] for name in ("eager", "graph")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    # A graph keeps its activations. AdamW's state, a quarter of the total, is allocated after the
    # capture, and so adds to them.
    assert 0.95 * eager < graph < 1.3 * eager


@pytest.mark.gpu
def test_memory_of_earlier_runs_does_not_count(tmp_path: Path) -> None:
    """The first run leaves workspaces behind, which the next run must not count."""
    on_gpu([], tmp_path / "zeroth", graph=True)
    first = on_gpu([], tmp_path / "first", graph=True).peak.bytes
    other = torch.zeros(2**26, device="cuda")
    second = on_gpu([], tmp_path / "second", graph=True).peak.bytes
    del other  # allocated during the whole second run
    assert first == pytest.approx(second, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_an_ordinary_step_does_not_synchronise(graph: bool, tmp_path: Path) -> None:
    ordinary = ["update_every=100", "refresh_every=100", "steps=8", "amp=bf16"]
    training = on_gpu(ordinary, tmp_path / "run", graph=graph)
    assert training.optimizer.state[training.model.head.weight]["step"] == 8  # next refresh: 16
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training._take_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_one_rank_of_nccl_trains_like_one_process(parallel: str, tmp_path: Path) -> None:
    run_on_ranks(1, train_on_one_gpu, str(tmp_path), parallel, backend="nccl")
    trained(transformer(), tmp_path / "one", World("none", torch.device("cuda")))
    losses = [
        [line["loss"] for line in lines(tmp_path / name, "train")] for name in ("rank", "one")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def train_on_one_gpu(rank: int, folder: str, parallel: str) -> None:
    trained(transformer(), Path(folder) / "rank", World(parallel, torch.device("cuda", 0), 0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["kfac", "adabk", "eva", "mfac", "caspr"])
def test_every_optimizer_trains_on_a_gpu(optimizer: str, tmp_path: Path) -> None:
    world = World("none", torch.device("cuda"))
    recipe = small(f"optimizer={optimizer}", "steps=120", "model.width=16", "base=adamw", "lr=1e-3")
    training = trained(recipe, tmp_path / "run", world)
    records = lines(tmp_path / "run", "train")
    assert records[-1]["loss"] < 0.95 * records[0]["loss"]
    assert training.step == 120


@pytest.mark.gpu
def test_a_compiled_network_trains_like_an_eager_one(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        world = World("none", torch.device("cuda"), compile=compiled)
        training = trained(small("steps=5"), tmp_path / str(compiled), world)
        losses.append(training.last["eval"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
