"""The subcommands ``train`` and ``compare``."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Exit, Option, echo

from kronbit.cli import options
from kronbit.lab.errors import LabError
from kronbit.lab.files import make_folder
from kronbit.lab.recipe import find_recipe
from kronbit.lab.training.world import World, join_world

TRAIN_EXAMPLES = (
    "Examples: kronbit train pydoc-gpt --optimizer shampoo --bits 4 --base adamw  |  "
    "kronbit train cifar100-swin-tiny --data ~/data --amp bf16 --cuda-graph --set epochs=30  |  "
    "kronbit train --resume runs/pydoc-gpt-shampoo-20261116-120000  |  "
    "torchrun --nproc-per-node 2 -m kronbit train pydoc-gpt --parallel fsdp2"
)
COMPARE_EXAMPLES = (
    "Examples: kronbit compare  |  kronbit compare digits-vit --seeds 3  |  "
    "kronbit compare cifar100-resnet34 -o base -o 'base longer=1.5' -o shampoo-4 "
    "-o 'caspr-4 lr=0.05' --data ~/data  |  "
    "kronbit compare --out runs/first --resume"
)


def train(
    recipe: Annotated[str | None, options.RECIPE] = None,
    optimizer: Annotated[
        str | None, Option(help="base (alone), shampoo, caspr, kfac, adabk, eva, mfac or muon.")
    ] = None,
    bits: Annotated[
        int | None, Option(help="Bits of the second-order state: 32, 8, 6, 4 or 3.")
    ] = None,
    base: options.Base = None,
    settings: options.Settings = None,
    seed: Annotated[int | None, Option(help="Seed of weights and data.")] = None,
    out: options.Out = None,
    data: options.DataFolder = None,
    resume: Annotated[
        Path | None, Option(help="Resume the run in this folder, bit for bit.")
    ] = None,
    parallel: Annotated[str, Option(help="none; ddp or fsdp2 under torchrun.")] = "none",
    device: options.Device = None,
    amp: options.Amp = None,
    compile: options.Compile = False,
    cuda_graph: options.CudaGraph = False,
    tensorboard: options.TensorBoard = False,
) -> None:
    """Train a recipe once, with evaluations and checkpoints. Ctrl-C saves and stops."""
    from kronbit.lab.optimizers import label_of, refuse_unused_options
    from kronbit.lab.report.runs import find_runs
    from kronbit.lab.report.tables import show_table
    from kronbit.lab.training import experiment
    from kronbit.lab.training.loop import Interrupted
    from kronbit.lab.training.terminal import Terminal

    given = options.merge(settings, optimizer=optimizer, bits=bits, base=base, seed=seed, amp=amp)
    if resume is not None:
        if recipe is not None or given or out is not None:
            raise LabError("--resume takes all settings from the run: give no others")
        trial, before = experiment.read_trial(resume)
        device, data = device or before["device"], data or Path(before["data"])
        compile, cuda_graph = compile or before["compile"], cuda_graph or before["graph"]
        place: AbstractContextManager[Path] = nullcontext(resume)
    elif recipe is None:
        raise LabError("no recipe given: `kronbit recipes` lists them; --resume RUN resumes a run")
    else:
        made = find_recipe(recipe).with_settings(given)
        refuse_unused_options(made)
        place = options.output_folder(out, f"{made.name}-{made.optimizer}")
    how = {"compile": compile, "graph": cuda_graph, "tensorboard": tensorboard}
    world = join_world(parallel, device, data=data or World.data, **how)
    if not world.first:
        place = nullcontext(Path())  # all ranks use the folder of the first
    try:
        with place as folder, Terminal(Console(stderr=True, quiet=not world.first)) as terminal:
            folder = Path(world.agree_on(str(folder)))
            if resume is None:
                command = experiment.train_command(made, recipe or "", world)
                trial = experiment.Trial(made.optimizer, label_of(made), made, command)
            elif (before["parallel"], before["ranks"]) != (world.parallel, world.ranks):
                terminal.message(
                    f"started on {before['ranks']} ranks ({before['parallel']}), resumed on "
                    f"{world.ranks} ({world.parallel}): results differ in rounding"
                )
            summary = experiment.run_trial(trial, folder, world, terminal, resume is not None)
    except Interrupted:
        if world.first:
            echo(f"saved; resume with: {experiment.resume_command(folder, world)}", err=True)
        raise Exit(130) from None
    finally:
        world.leave()
    if world.first:
        show_table(find_runs([folder]), Console())
        print(f"{summary['steps']} steps, written to {folder}")
        if not summary["finished"]:
            raise LabError(f"the loss was no longer finite at step {summary['steps']}")


def compare(
    recipe: Annotated[str, options.RECIPE] = "pydoc-gpt",
    optimizers: Annotated[
        list[str] | None,
        Option(
            "--optimizer",
            "-o",
            help="Repeatable: base, shampoo-32, shampoo-4-naive, shampoo-4-paper, shampoo-4, "
            "caspr-4, kfac-4, ..., optionally followed by settings.",
        ),
    ] = None,
    seeds: Annotated[int, Option(help="Number of seeds, from the recipe's seed on.", min=1)] = 1,
    base: options.Base = None,
    settings: options.Settings = None,
    out: options.Out = None,
    data: options.DataFolder = None,
    resume: Annotated[
        bool, Option("--resume", help="Keep finished runs in --out and resume the others.")
    ] = False,
    device: options.Device = None,
    amp: options.Amp = None,
    compile: options.Compile = False,
    cuda_graph: options.CudaGraph = False,
) -> None:
    """Train one network from the same seeds with several optimizers, and write a report."""
    from kronbit.lab.optimizers import DEFAULT_VARIANTS, check_optimizer
    from kronbit.lab.report.runs import find_runs
    from kronbit.lab.training.experiment import make_trial, run_all, write_comparison
    from kronbit.lab.training.loop import Interrupted
    from kronbit.lab.training.terminal import Terminal

    if resume and out is None:
        raise LabError("--resume needs --out: the folder of the comparison")
    start = find_recipe(recipe).with_settings(options.merge(settings, base=base, amp=amp))
    world = join_world("none", device, data=data or World.data, compile=compile, graph=cuda_graph)
    trials = [
        make_trial(spec, start.with_settings({"seed": start.seed + seed}), recipe, world)
        for spec in optimizers or DEFAULT_VARIANTS
        for seed in range(seeds)
    ]
    if len({trial.folder for trial in trials}) < len(trials):
        raise LabError("the same optimizer was given twice: add a setting to one of them")
    for trial in trials:
        world.refuse_conflicts(trial.recipe)
        check_optimizer(trial.recipe)
    place, command = options.output_folder(out, start.name, resume), options.command_line()
    try:
        with place as folder, Terminal(Console(stderr=True)) as terminal:
            make_folder(folder)
            summaries = run_all(trials, folder, world, terminal, resume)
    except Interrupted:
        where = "" if out else f" --out {shlex.quote(str(folder))}"
        again = command if resume else f"{command}{where} --resume"
        echo(f"saved; resume with: {again}", err=True)
        raise Exit(130) from None
    write_comparison(folder, start, command, world, summaries)
    options.show_report(find_runs([folder]), folder, f"{start.name}: {start.about}", command)
