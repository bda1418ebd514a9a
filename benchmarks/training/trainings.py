"""The training runs for docs/results, as data: tables of runs, in stages.

``run_queue.py`` in this folder runs them.
"""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedRun:
    """One training run of a table.

    Attributes:
        table: Name of the table, which is a folder of ``results``.
        name: Name of the run, which names its folder and its file.
        spec: Optimizer and settings, as ``kronbit compare -o`` takes them.
        seed: Seed of weights and batches.
        trainings: The table.
    """

    table: str
    name: str
    spec: str
    seed: int
    trainings: Trainings

    @property
    def path(self) -> str:
        """Folder of the run, relative to the folder of all runs."""
        return f"{self.table}/{self.name}"

    @property
    def variant(self) -> str:
        """Name of the spec in raw files."""
        return "-".join(shlex.split(self.spec)).replace("/", "_")

    @property
    def words(self) -> list[str]:
        """The command, without ``--data`` and ``--out``."""
        return self.trainings.words(self.spec, self.seed)


@dataclass(frozen=True)
class Trainings:
    """Runs of one recipe: a table.

    Attributes:
        recipe: Name of the recipe.
        specs: Optimizers with their settings, as ``kronbit compare -o`` takes them.
        settings: Settings of all runs, as for ``--set``.
        seeds: Number of seeds, from 0 on.
        flags: Flags of the command.
        stage: Place in the queue; lower stages run first.
        alone: True if a run must have the GPU to itself because it is timed.
    """

    recipe: str
    specs: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: int = 1
    flags: tuple[str, ...] = ("--cuda-graph",)
    stage: int = 5
    alone: bool = False

    def words(self, spec: str, seed: int) -> list[str]:
        """Return the command of one run, without ``--data`` and ``--out``."""
        settings = [f"--set={text}" for text in (*self.settings, f"seed={seed}")]
        return ["compare", self.recipe, "-o", spec, *settings, *self.flags]

    def runs(self, table: str) -> list[PlannedRun]:
        """Return all runs, seed by seed, so that an interrupted table has complete columns."""
        return [
            PlannedRun(table, self._name(spec, seed), spec, seed, self)
            for seed in range(self.seeds)
            for spec in self.specs
        ]

    def _name(self, spec: str, seed: int) -> str:
        # The digest distinguishes results of other settings.
        digest = f"{zlib.crc32(shlex.join(self.words(spec, seed)).encode()):08x}"
        return re.sub(r"[^\w.-]+", "-", f"{spec}-seed{seed}-{digest}")


def at_rates(names: Iterable[str], rates: Iterable[str]) -> tuple[str, ...]:
    """Return every optimizer at every learning rate."""
    rates = tuple(rates)
    return tuple(f"{name} lr={lr}" for name in names for lr in rates)


SHAMPOOS = ("shampoo-32", "shampoo-4-naive", "shampoo-4-paper", "shampoo-4")
PAPER = "shampoo-4-paper"
SOAP = "base base=pytorch_optimizer.SOAP"
# Rows of the paper's Table 2, with the naive method of its Table 3; the longest first.
TABLE_2 = ("base longer=1.5", "shampoo-32", "shampoo-4-naive", PAPER)
# kronbit's rows next to it.
OURS = ("shampoo-4",)
# Settings of the paper, spelled out to be independent of defaults.
PAPERS = (
    *("shampoo.update_every=100", "shampoo.refresh_every=500", "shampoo.first_refresh=null"),
    *("shampoo.beta=0.95", "shampoo.damping=1e-6", "shampoo.start=1e-6"),
    *("shampoo.max_order=1200", "shampoo.split=greedy", "shampoo.mapping=linear2"),
    *("shampoo.stagger=false", "shampoo.newton_steps=10"),
    *("eigen.update_rectify=1", "eigen.refresh_rectify=4", "eigen.qr_iterations=1"),
    "eigen.root=eigen",
)
PAPERS_LAYERS = (
    *("kfac.update_every=200", "kfac.refresh_every=2000", "kfac.first_refresh=null"),
    *("kfac.beta=0.9", "kfac.start=0", "kfac.stagger=false"),
)
# Only the last checkpoint is needed, and separate runs watch the roots.
_LEAN = ("keep=1", "watched_blocks=0")
_TEN = ("epochs=10", "warmup_epochs=2", "eval_every=390", *_LEAN)
_THIRTY = ("epochs=30", "warmup_epochs=5", "eval_every=390", *_LEAN)
_FULL = ("eval_every=1950", "checkpoint_every=10000", *_LEAN)  # every 5 epochs
# With the errors of one block during the whole run.
_FULL_WATCHED = (*_FULL[:-1], "watched_blocks=1")
_PASS = ("steps=1200", "eval_every=100", *_LEAN)  # nearly one pass over 20 million tokens
_THOUSAND = ("steps=1000", "eval_every=1000", "checkpoint_every=1000000", *_LEAN)
# For tables that were started before the recipe had drop_path.
_WHOLE = "model.drop_path=0"
_BF16 = ("--amp", "bf16")
_BF16_GRAPH = (*_BF16, "--cuda-graph")

# Checks that AdamW trains at the paper's learning rate with bf16 and the recipe's warm-up. It did
# not at a tenth of the length of Table 2, with a warm-up of 2 epochs.
_PROBE = ("lr=1e-3", "epochs=15", "schedule=constant", "eval_every=390", *_LEAN)
_PROBES = {
    "cifar100-swin-tiny-probe": Trainings(
        "cifar100-swin-tiny", ("base",), _PROBE, flags=_BF16_GRAPH, stage=0
    ),
    "cifar100-vit-small-probe": Trainings(
        "cifar100-vit-small", ("base",), _PROBE, flags=_BF16_GRAPH, stage=0
    ),
}

# Table 2 on CIFAR-100: length, learning rate and schedule are those of the recipes.
_TABLE_2 = {
    "cifar100-swin-tiny-100-epochs": Trainings(
        "cifar100-swin-tiny", TABLE_2, (*_FULL_WATCHED, *PAPERS), flags=_BF16_GRAPH, stage=1
    ),
    "cifar100-vit-small-100-epochs": Trainings(
        "cifar100-vit-small", TABLE_2, (*_FULL, *PAPERS), flags=_BF16_GRAPH, stage=1
    ),
    "cifar100-resnet34-200-epochs": Trainings(
        "cifar100-resnet34", TABLE_2, (*_FULL, *PAPERS), stage=1
    ),
    "cifar100-vgg19-200-epochs": Trainings("cifar100-vgg19", TABLE_2, (*_FULL, *PAPERS), stage=1),
    "cifar100-swin-tiny-100-epochs-ours": Trainings(
        "cifar100-swin-tiny", OURS, _FULL, flags=_BF16_GRAPH, stage=2
    ),
    "cifar100-vit-small-100-epochs-ours": Trainings(
        "cifar100-vit-small", OURS, _FULL, flags=_BF16_GRAPH, stage=2
    ),
    "cifar100-resnet34-200-epochs-ours": Trainings("cifar100-resnet34", OURS, _FULL, stage=2),
    "cifar100-vgg19-200-epochs-ours": Trainings("cifar100-vgg19", OURS, _FULL, stage=2),
}

# Milliseconds of a step.
_TIMES = {
    "cifar100-swin-tiny-times": Trainings(
        "cifar100-swin-tiny",
        ("base", "shampoo-4", "shampoo-32", PAPER),
        ("lr=1e-4", "warmup_epochs=5", _WHOLE, *_THOUSAND),
        flags=_BF16_GRAPH,
        stage=2,
        alone=True,
    ),
    "cifar100-vit-small-times": Trainings(
        "cifar100-vit-small",
        ("base", *SHAMPOOS),
        ("lr=1e-4", *_THOUSAND),
        flags=_BF16_GRAPH,
        stage=2,
        alone=True,
    ),
    "cifar100-resnet34-times": Trainings(
        "cifar100-resnet34", ("base", *SHAMPOOS), ("lr=0.1", *_THOUSAND), stage=2, alone=True
    ),
    "cifar100-vgg19-times": Trainings(
        "cifar100-vgg19", ("base", *SHAMPOOS), ("lr=0.1", *_THOUSAND), stage=2, alone=True
    ),
}

# Learning rates, selected on a part of the training set.
_CHOSEN_ON = "holdout=0.1"
_TRANSFORMER_RATES = ("2.5e-4", "5e-4", "1e-3")
_CNN_RATES = ("0.2", "0.4", "0.8")
_RATES = {
    "cifar100-swin-tiny-rates": Trainings(
        "cifar100-swin-tiny",
        at_rates(("base", *SHAMPOOS, "muon"), _TRANSFORMER_RATES),
        (*_TEN, _CHOSEN_ON),
        flags=_BF16_GRAPH,
        stage=3,
    ),
    "cifar100-vit-small-rates": Trainings(
        "cifar100-vit-small",
        at_rates(("base", *SHAMPOOS, "muon"), _TRANSFORMER_RATES),
        (*_TEN, _CHOSEN_ON),
        flags=_BF16_GRAPH,
        stage=3,
    ),
    "cifar100-resnet34-rates": Trainings(
        "cifar100-resnet34",
        at_rates(("base", *SHAMPOOS), _CNN_RATES),
        (*_TEN, _CHOSEN_ON),
        stage=3,
    ),
    "cifar100-vgg19-rates": Trainings(
        "cifar100-vgg19",
        at_rates(("base", *SHAMPOOS), ("0.1", "0.2", "0.4")),
        (*_TEN, _CHOSEN_ON),
        stage=3,
    ),
}

# Rows with learning rates chosen by us: all rates first, then the best one for more epochs.
_CHOICES = {
    "cifar100-swin-tiny-10-epochs": Trainings(
        "cifar100-swin-tiny",
        (
            *at_rates(("base", *SHAMPOOS), ("1.25e-4", "2.5e-4", "5e-4", "1e-3")),
            *at_rates(("muon",), ("2.5e-4", "5e-4", "1e-3")),
        ),
        (*_TEN, _WHOLE),
        flags=_BF16_GRAPH,
    ),
    "cifar100-resnet34-10-epochs": Trainings(
        "cifar100-resnet34", at_rates(("base", *SHAMPOOS), ("0.05", "0.1", "0.2")), _TEN
    ),
    "cifar100-swin-tiny-peers": Trainings(
        "cifar100-swin-tiny",
        (*at_rates(("muon",), ("2e-3", "4e-3")), *at_rates((SOAP,), ("2.5e-4", "5e-4", "1e-3"))),
        (*_TEN, _WHOLE),
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
    "cifar100-swin-tiny-30-epochs": Trainings(
        "cifar100-swin-tiny",
        at_rates(("base longer=1.5", "base", *SHAMPOOS), ("2.5e-4",)),
        (*_THIRTY, _WHOLE),
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
        "cifar100-swin-tiny",
        ("muon lr=1e-3",),
        (*_THIRTY, _WHOLE),
        seeds=2,
        flags=_BF16_GRAPH,
    ),
    "wiki-gpt2-124m-8-bit": Trainings(
        "wiki-gpt2-124m",
        ("base base=adamw8bit lr=1e-3", "shampoo-4 base=adamw8bit lr=1e-3"),
        _PASS,
    ),
    "wiki-llama-350m": Trainings(
        "wiki-llama-350m",
        at_rates(("base", "shampoo-4", "muon"), ("1e-3",)),
        ("steps=600", "eval_every=100", *_LEAN),
    ),
    "cifar100-swin-tiny-intervals": Trainings(
        "cifar100-swin-tiny",
        tuple(
            f"shampoo-4 lr={lr} first_refresh=10 update_every={T1} refresh_every={T2}"
            for lr in ("2.5e-4", "5e-4")
            for T1, T2 in ((50, 100), (10, 50), (5, 20))
        ),
        (*_TEN, _WHOLE),
        flags=_BF16_GRAPH,
    ),
    "pydoc-gpt-soap": Trainings(  # on a CPU
        "pydoc-gpt", at_rates((SOAP,), ("3e-3", "6e-3", "1.2e-2", "2.4e-2")), (), seeds=2, flags=()
    ),
}

# The paper's other tables and figures.
_OTHERS = {
    "quantisation-error-over-time": Trainings(
        "cifar100-swin-tiny",
        (
            *(f"{name} lr=5e-4 damping=1e-4" for name in SHAMPOOS[1:]),
            *(f"{name} lr=5e-4" for name in SHAMPOOS[1:]),
            *(
                f"shampoo-4 lr=5e-4 method=eigen storage=compact damping={damping}"
                for damping in ("1e-4", "1e-6")
            ),
        ),
        ("epochs=10", "warmup_epochs=2", "eval_every=390", "keep=1", _WHOLE),
        flags=_BF16_GRAPH,
    ),
    "cifar100-swin-tiny-ablations": Trainings(  # Table 3
        "cifar100-swin-tiny",
        (
            PAPER,
            "shampoo-4-naive",
            "shampoo-4",
            "shampoo-4-naive mapping=dt",
            f"{PAPER} mapping=dt",
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
        ("lr=2.5e-4", *_THIRTY, *PAPERS),
        flags=_BF16_GRAPH,
        stage=6,
    ),
    "cifar100-swin-tiny-caspr": Trainings(  # Table 4
        "cifar100-swin-tiny",
        ("caspr-32", "caspr-4-paper", "caspr-4"),
        ("lr=2.5e-4", *_THIRTY, *PAPERS),
        flags=_BF16_GRAPH,
        stage=6,
    ),
    "cifar100-swin-tiny-layers": Trainings(  # Table 4
        "cifar100-swin-tiny",
        ("kfac-32", "kfac-4-paper", "adabk-32", "adabk-4-paper"),
        ("lr=2.5e-4", *_THIRTY, *PAPERS_LAYERS),
        flags=_BF16,  # a CUDA graph skips the hooks of layers
        stage=6,
    ),
    "cifar100-swin-tiny-bases": Trainings(  # Table 10
        "cifar100-swin-tiny",
        (
            *("base base=nadamw lr=1e-3 longer=1.5", "shampoo-4 base=nadamw lr=1e-3"),
            "base base=adagrad lr=0.01 weight_decay=0.0005 longer=1.5",
            *(
                f"{name} base=adagrad lr=0.01 weight_decay=0.0005"
                for name in ("shampoo-32", PAPER, "shampoo-4")
            ),
        ),
        (*_THIRTY, *PAPERS),
        flags=_BF16_GRAPH,
        stage=6,
    ),
    "cifar100-swin-tiny-schedule-free": Trainings(  # Table 9
        "cifar100-swin-tiny",
        ("base longer=1.5", "shampoo-4"),
        (
            *("base=schedulefree-adamw", "schedule=schedule-free", "lr=0.0025"),
            *("base_options.warmup_steps=10000", *_FULL, *PAPERS),
        ),
        flags=_BF16_GRAPH,
        stage=6,
    ),
    "cifar100-resnet34-schedule-free": Trainings(  # Table 9
        "cifar100-resnet34",
        ("base longer=1.5",),
        (
            *("base=schedulefree-sgd", "schedule=schedule-free", "lr=1.0"),
            *("base_options.warmup_steps=2000", *_FULL),
        ),
        stage=6,
    ),
    "cifar100-resnet34-cosine": Trainings(  # Tables 8 and 11
        "cifar100-resnet34",
        ("base longer=1.5", "base", "shampoo-32", PAPER, "shampoo-4", "mfac"),
        ("lr=0.1", "schedule=cosine", *_THIRTY, *PAPERS),
        stage=6,
    ),
    "cifar100-resnet34-eva": Trainings(
        "cifar100-resnet34", ("eva",), ("lr=0.1", "schedule=cosine", *_THIRTY), flags=(), stage=6
    ),
}

TRAININGS = {**_PROBES, **_TABLE_2, **_TIMES, **_RATES, **_CHOICES, **_OTHERS}
