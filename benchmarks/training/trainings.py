r"""The trainings that docs/results is made of: which they are, and how to run them.

Usage::

    python benchmarks/training/trainings.py NAME... --data DATA --out RUNS [--together 6] \
        [--seconds 540]

A NAME is a key of ``TRAININGS``. Every run is a process of its own, ``--together`` of them at a
time: that changes no result, only their times, which are left out then. After ``--seconds`` all
that run are asked to save and stop; the same command goes on with them. When all of a NAME are
finished, their figures are written to results/NAME/summary.json.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from collect_results import write_collected

ROOT = Path(__file__).parents[2]
_OUTCOMES = {0: "finished", 130: "stopped"}  # by exit code


@dataclass(frozen=True)
class Trainings:
    """Runs of one recipe.

    Attributes:
        recipe: Its name.
        members: Optimizers, as ``kronbit compare -o`` takes them.
        settings: Of all of them, as for ``--set``.
        seeds: From 0 on.
        flags: How they run.
    """

    recipe: str
    members: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: int = 1
    flags: tuple[str, ...] = ("--cuda-graph",)

    def commands(self) -> dict[str, list[str]]:
        """The command of every run, but for ``--data`` and ``--out``, by a name for its folder.

        One seed after the other: a table that is cut off has whole columns.
        """
        found = {}
        for seed in range(self.seeds):
            for member in self.members:
                settings = [f"--set={text}" for text in (*self.settings, f"seed={seed}")]
                words = ["compare", self.recipe, "-o", member, *settings, *self.flags]
                # Other settings, another folder: what lies in one is never of an older table.
                digest = f"{zlib.crc32(shlex.join(words).encode()):08x}"
                found[re.sub(r"[^\w.=-]+", "-", f"{member}-seed{seed}-{digest}")] = words
        return found


def at_rates(names: Iterable[str], rates: Iterable[str]) -> tuple[str, ...]:
    """Every optimizer at every learning rate."""
    rates = tuple(rates)
    return tuple(f"{name} lr={lr}" for name in names for lr in rates)


SHAMPOOS = ("shampoo-32", "shampoo-4-naive", "shampoo-4-paper", "shampoo-4")
PAPER = "shampoo-4-paper"
SOAP = "base base=pytorch_optimizer.SOAP"
# Only the last checkpoint is of use, and roots are watched in runs of their own.
_LEAN = ("keep=1", "watched_blocks=0")
_TEN = ("epochs=10", "warmup_epochs=2", "eval_every=390", *_LEAN)
_THIRTY = ("epochs=30", "warmup_epochs=5", "eval_every=390", *_LEAN)
_PASS = ("steps=1200", "eval_every=100", *_LEAN)  # over 20 million tokens, nearly
_THOUSAND = ("steps=1000", "eval_every=1000", "checkpoint_every=1000000", *_LEAN)
_BF16 = ("--amp", "bf16")
_BF16_GRAPH = (*_BF16, "--cuda-graph")

TRAININGS = {
    # Every learning rate.
    "cifar100-swin-tiny-10-epochs": Trainings(
        "cifar100-swin-tiny",
        (
            *at_rates(("base", *SHAMPOOS), ("1.25e-4", "2.5e-4", "5e-4", "1e-3")),
            *at_rates(("muon",), ("2.5e-4", "5e-4", "1e-3")),
        ),
        _TEN,
        flags=_BF16_GRAPH,
    ),
    "cifar100-resnet34-10-epochs": Trainings(
        "cifar100-resnet34", at_rates(("base", *SHAMPOOS), ("0.05", "0.1", "0.2")), _TEN
    ),
    "cifar100-swin-tiny-peers": Trainings(
        "cifar100-swin-tiny",
        (*at_rates(("muon",), ("2e-3", "4e-3")), *at_rates((SOAP,), ("2.5e-4", "5e-4", "1e-3"))),
        _TEN,
        flags=_BF16_GRAPH,
    ),
    "cifar100-resnet34-high-rates": Trainings(
        "cifar100-resnet34", at_rates(("base", *SHAMPOOS), ("0.4",)), _TEN
    ),
    "cifar100-resnet34-highest-rates": Trainings(
        "cifar100-resnet34", at_rates(("base", *SHAMPOOS), ("0.8",)), _TEN
    ),
    "wiki-gpt2-124m": Trainings(
        "wiki-gpt2-124m",
        at_rates(("base", *SHAMPOOS, "muon", SOAP), ("5e-4", "1e-3", "2e-3")),
        _PASS,
    ),
    "wiki-llama-130m": Trainings(
        "wiki-llama-130m",
        at_rates(("base", *SHAMPOOS, "muon", SOAP), ("5e-4", "1e-3", "2e-3")),
        _PASS,
    ),
    # The best learning rate, longer. The longest first, so that none is left alone in the end.
    "cifar100-swin-tiny-30-epochs": Trainings(
        "cifar100-swin-tiny",
        at_rates(("base longer=1.5", "base", *SHAMPOOS), ("2.5e-4",)),
        _THIRTY,
        seeds=2,
        flags=_BF16_GRAPH,
    ),
    "cifar100-resnet34-30-epochs": Trainings(
        "cifar100-resnet34",
        at_rates(("base longer=1.5", "base", *SHAMPOOS), ("0.8",)),
        _THIRTY,
        seeds=2,
    ),
    "cifar100-swin-tiny-muon-30-epochs": Trainings(
        "cifar100-swin-tiny", ("muon lr=1e-3",), _THIRTY, seeds=2, flags=_BF16_GRAPH
    ),
    # Short, to be run with --together 1: what a step takes.
    "cifar100-swin-tiny-times": Trainings(
        "cifar100-swin-tiny",
        ("base", "shampoo-4", "shampoo-32", "shampoo-4-paper"),
        ("lr=1e-4", *_THOUSAND),
        flags=_BF16_GRAPH,
    ),
    "cifar100-resnet34-times": Trainings(
        "cifar100-resnet34", ("base", *SHAMPOOS), ("lr=0.1", *_THOUSAND)
    ),
    # One learning rate.
    "quantisation-error-over-time": Trainings(
        "cifar100-swin-tiny",
        tuple(
            f"{name} lr=5e-4 damping={damping}"
            for damping in ("1e-4", "1e-6")
            for name in (*SHAMPOOS[1:], "shampoo-4 method=eigen storage=compact")
        ),
        ("epochs=10", "warmup_epochs=2", "eval_every=390", "keep=1"),
        flags=_BF16_GRAPH,
    ),
    "cifar100-swin-tiny-intervals": Trainings(
        "cifar100-swin-tiny",
        tuple(
            f"shampoo-4 lr={lr} first_refresh=10 update_every={T1} refresh_every={T2}"
            for lr in ("2.5e-4", "5e-4")
            for T1, T2 in ((50, 100), (10, 50), (5, 20))
        ),
        _TEN,
        flags=_BF16_GRAPH,
    ),
    "cifar100-swin-tiny-ablations": Trainings(
        "cifar100-swin-tiny",
        (
            f"{PAPER} mapping=dt update_rectify=0",
            f"{PAPER} update_rectify=0",
            "shampoo-4 mapping=dt",
            "shampoo-4-naive bits=3",
            f"{PAPER} bits=3 mapping=dt update_rectify=0",
            f"{PAPER} bits=3 update_rectify=0",
            f"{PAPER} bits=3 update_rectify=0 refresh_rectify=0",
            f"{PAPER} bits=3",
            "shampoo-4 bits=3",
        ),
        ("lr=2.5e-4", *_TEN),
        flags=_BF16_GRAPH,
    ),
    "cifar100-swin-tiny-bases": Trainings(
        "cifar100-swin-tiny",
        (
            *at_rates(("caspr-32", "caspr-4-paper", "caspr-4"), ("2.5e-4",)),
            *at_rates(("base base=nadamw", "shampoo-4 base=nadamw"), ("2.5e-4",)),
            *(
                f"{name} base=adagrad lr=0.01 weight_decay=0.0005"
                for name in ("base", *SHAMPOOS[2:], "shampoo-32")
            ),
            *(
                f"{name} base=schedulefree-adamw schedule=schedule-free lr=1e-3"
                for name in ("base", "shampoo-4")
            ),
        ),
        _TEN,
        flags=_BF16_GRAPH,
    ),
    "cifar100-swin-tiny-layers": Trainings(
        "cifar100-swin-tiny",
        ("kfac-32", "kfac-4", "adabk-32", "adabk-4"),
        ("lr=2.5e-4", "first_refresh=100", "update_every=100", "refresh_every=500", *_TEN),
        flags=_BF16,  # a CUDA graph leaves out the hooks of layers
    ),
    "cifar100-resnet34-cosine": Trainings(
        "cifar100-resnet34",
        ("base", "shampoo-32", "shampoo-4-paper", "shampoo-4", "mfac"),
        ("lr=0.2", "schedule=cosine", *_TEN),
    ),
    "cifar100-resnet34-eva": Trainings(
        "cifar100-resnet34", ("eva",), ("lr=0.2", "schedule=cosine", *_TEN), flags=()
    ),
    "cifar100-vit-small": Trainings(
        "cifar100-vit-small",
        at_rates(("base", *SHAMPOOS, "muon"), ("2.5e-4",)),
        _TEN,
        flags=_BF16_GRAPH,
    ),
    "cifar100-vgg19": Trainings("cifar100-vgg19", at_rates(("base", *SHAMPOOS), ("0.05",)), _TEN),
    "wiki-gpt2-124m-8-bit": Trainings(
        "wiki-gpt2-124m",
        ("base base=adamw8bit lr=1e-3", "shampoo-4 base=adamw8bit lr=1e-3"),
        _PASS,
    ),
    # On a CPU.
    "pydoc-gpt-soap": Trainings(
        "pydoc-gpt", at_rates((SOAP,), ("3e-3", "6e-3", "1.2e-2", "2.4e-2")), (), seeds=2, flags=()
    ),
    "wiki-llama-350m": Trainings(
        "wiki-llama-350m",
        at_rates(("base", "shampoo-4", "muon"), ("1e-3",)),
        ("steps=600", "eval_every=100", *_LEAN),
    ),
}


def run_together(
    commands: dict[str, list[str]], data: Path, out: Path, together: int, seconds: float
) -> list[str]:
    """Run what is not finished yet, several at a time.

    Args:
        commands: Of ``Trainings``.
        data: Where data sets lie.
        out: Where runs go, each to a folder of its own.
        together: How many at a time.
        seconds: After which they are asked to save and stop.

    Returns:
        The names of those that are not finished.
    """
    end = time.monotonic() + seconds
    waiting = [name for name in commands if not (out / name / "summary.json").is_file()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    unfinished = []
    while waiting or running:
        late = time.monotonic() > end
        while waiting and not late and len(running) < together:
            name = waiting.pop(0)
            words = [*commands[name], "--data", str(data), "--out", str(out / name), "--resume"]
            log = out / f"{name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "kronbit", *words], stdout=file, stderr=file
                )
        if late:
            unfinished += waiting
            waiting.clear()
            for process in running.values():
                process.send_signal(signal.SIGINT)
        for name, process in list(running.items()):
            code = process.wait() if late else process.poll()
            if code is None:
                continue
            del running[name]
            print(f"{name}: {_OUTCOMES.get(code, f'exit {code}')}", flush=True)
            if code not in _OUTCOMES and not late:  # one that has only begun may end anyhow
                print((out / f"{name}.log").read_text(errors="replace")[-2000:], flush=True)
            if code != 0:
                unfinished.append(name)
        time.sleep(0.2)
    return unfinished


def most_together(out: Path, together: int) -> int:
    """How many runs have shared the device at most, in all calls with this folder."""
    path = out / "together.txt"
    most = max(together, int(path.read_text()) if path.is_file() else 1)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{most}\n")
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=TRAININGS, metavar="NAME")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--commit", default="", help="that they are run with")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    given = parser.parse_args(arguments)
    commands = {
        f"{name}/{own}": words
        for name in given.names
        for own, words in TRAININGS[name].commands().items()
    }
    most = most_together(given.out, given.together)
    unfinished = run_together(commands, given.data, given.out, given.together, given.seconds)
    for name in given.names:
        own = [run for run in commands if run.startswith(f"{name}/")]
        left = sorted(set(own) & set(unfinished))
        if left:
            print(f"not finished: {', '.join(left)}")
            continue
        target = given.results / name / "summary.json"
        write_collected([given.out / run for run in own], target, given.commit, most)
        print(f"written: {target}")
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
