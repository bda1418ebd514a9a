"""The subcommands ``train`` and ``compare``."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kronbit.cli.options import (
    RECIPE,
    Amp,
    Base,
    Compile,
    CudaGraph,
    DataFolder,
    Device,
    Out,
    Settings,
    TensorBoard,
    command_line,
    drop_none,
    output_folder,
    refuse_used_folder,
    show_runs,
)
from kronbit.lab.errors import LabError
from kronbit.lab.recipe import find_recipe, parse_settings

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
    recipe: Annotated[str | None, RECIPE] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="base (alone), shampoo, caspr, kfac, adabk, eva, mfac or muon."),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits of the second-order state: 32, 8, 6, 4 or 3.")
    ] = None,
    base: Base = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data.")] = None,
    out: Out = None,
    data: DataFolder = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder, bit for bit.")
    ] = None,
    parallel: Annotated[str, typer.Option(help="none; ddp or fsdp2 under torchrun.")] = "none",
    device: Device = None,
    amp: Amp = None,
    compile: Compile = False,
    cuda_graph: CudaGraph = False,
    tensorboard: TensorBoard = False,
) -> int:
    """Train a recipe once, with evaluations and checkpoints. Ctrl-C saves and stops."""
    from kronbit.lab.optimizers import label_of, refuse_unused_options
    from kronbit.lab.training.experiment import (
        Member,
        read_member,
        resume_command,
        run_member,
        train_command,
    )
    from kronbit.lab.training.loop import Interrupted
    from kronbit.lab.training.terminal import Terminal
    from kronbit.lab.training.world import World, join_world

    wishes = drop_none(optimizer=optimizer, bits=bits, base=base, seed=seed, amp=amp)
    if resume is not None:
        if recipe is not None or wishes or settings or out is not None:
            raise LabError("--resume takes all settings from the run: give no others")
        one, before = read_member(resume)
        device, data = device or before["device"], data or Path(before["data"])
        compile, cuda_graph = compile or before["compile"], cuda_graph or before["graph"]
        place: AbstractContextManager[Path] = nullcontext(resume)
    elif recipe is None:
        raise LabError("which recipe? `kronbit recipes` lists them; --resume RUN resumes a run")
    else:
        made = find_recipe(recipe).with_settings({**wishes, **parse_settings(settings or ())})
        refuse_unused_options(made)
        refuse_used_folder(out, resume=False)
        place = output_folder(out, f"{made.name}-{made.optimizer}")
    how = {"compile": compile, "graph": cuda_graph, "tensorboard": tensorboard}
    world = join_world(parallel, device, data=data or World.data, **how)
    console = Console(stderr=True, quiet=not world.first)
    try:
        with (
            place
            if world.first
            else nullcontext(Path()) as folder,  # all ranks use the folder of the first
            Terminal(console) as terminal,
        ):
            folder = Path(world.agree_on(str(folder)))
            if resume is None:
                command = train_command(made, recipe or "", world)
                one = Member(made.optimizer, label_of(made), made, command)
            elif (before["parallel"], before["ranks"]) != (world.parallel, world.ranks):
                terminal.message(
                    f"started on {before['ranks']} ranks ({before['parallel']}), resumed on "
                    f"{world.ranks} ({world.parallel}): results differ in rounding"
                )
            again = resume is not None
            summary = run_member(one, folder, world, terminal, again)
    except Interrupted:
        _tell(console, f"saved; resume with: {resume_command(folder, world)}")
        return 130
    finally:
        world.leave()
    if world.first:
        show_runs([folder])
        print(f"{summary['steps']} steps, written to {folder}")
        if not summary["finished"]:
            raise LabError(f"the loss was no longer finite at step {summary['steps']}")
    return 0


def _tell(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def compare(
    recipe: Annotated[str, RECIPE] = "pydoc-gpt",
    optimizers: Annotated[
        list[str] | None,
        typer.Option(
            "--optimizer",
            "-o",
            help="Repeatable: base, shampoo-32, shampoo-4-naive, shampoo-4-paper, shampoo-4, "
            "caspr-4, kfac-4, ..., optionally followed by settings.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Number of seeds, counted from the recipe's.", min=1)
    ] = 1,
    base: Base = None,
    settings: Settings = None,
    out: Out = None,
    data: DataFolder = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep finished runs in --out and resume the others.")
    ] = False,
    device: Device = None,
    amp: Amp = None,
    compile: Compile = False,
    cuda_graph: CudaGraph = False,
) -> int:
    """Train one network from one seed with several optimizers, and write a report."""
    from kronbit.lab.optimizers import DEFAULT_VARIANTS, check_optimizer
    from kronbit.lab.report.runs import find_runs
    from kronbit.lab.report.writing import write_report
    from kronbit.lab.training.experiment import member, run_all, write_comparison
    from kronbit.lab.training.files import make_folder
    from kronbit.lab.training.loop import Interrupted
    from kronbit.lab.training.terminal import Terminal
    from kronbit.lab.training.world import World, join_world

    if resume and out is None:
        raise LabError("--resume needs --out: the folder of the comparison")
    wishes = {**drop_none(base=base, amp=amp), **parse_settings(settings or ())}
    start = find_recipe(recipe).with_settings(wishes)
    specs = optimizers or DEFAULT_VARIANTS
    world = join_world("none", device, data=data or World.data, compile=compile, graph=cuda_graph)
    members = [
        member(spec, start.with_settings({"seed": start.seed + seed}), recipe, world)
        for spec in specs
        for seed in range(seeds)
    ]
    if len({one.folder for one in members}) < len(members):
        raise LabError("the same optimizer was given twice: add a setting to one of them")
    for one in members:
        world.refuse_conflicts(one.recipe)
        check_optimizer(one.recipe)
    refuse_used_folder(out, resume)
    console = Console(stderr=True)
    command = command_line()
    try:
        with (
            output_folder(out, start.name) as folder,
            Terminal(console) as terminal,
        ):
            make_folder(folder)
            summaries = run_all(members, folder, world, terminal, resume)
    except Interrupted:
        where = "" if out else f" --out {shlex.quote(str(folder))}"
        again = command if resume else f"{command}{where} --resume"
        _tell(console, f"saved; resume with: {again}")
        return 130
    write_comparison(folder, start, command, world, summaries)
    runs = find_runs([folder])
    written = write_report(runs, folder, f"{start.name}: {start.about}", command)
    show_runs([folder])
    print(f"report: {written}")
    return 0
