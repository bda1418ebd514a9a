"""The subcommands ``recipes``, ``report``, ``errors`` and ``plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kronbit.cli.options import (
    RECIPE,
    Amp,
    Base,
    Device,
    Json,
    Out,
    Settings,
    command_line,
    show_runs,
)
from kronbit.lab.errors import LabError
from kronbit.lab.recipe import find_recipe, parse_settings, recipe_names

RECIPES_EXAMPLES = "Examples: kronbit recipes  |  kronbit recipes show cifar100-swin-tiny"
SHOW_EXAMPLES = "Example: kronbit recipes show pydoc-gpt > mine.yaml"
REPORT_EXAMPLES = (
    "Examples: kronbit report runs/pydoc-gpt-20261116-120000  |  "
    "kronbit report runs/a runs/b --out runs/both"
)
ERRORS_EXAMPLES = (
    "Examples: kronbit errors  |  kronbit errors --bits 3 --out errors  |  "
    "kronbit errors runs/pydoc-gpt-shampoo-20261116-120000 --json"
)


def recipes(context: typer.Context) -> None:
    """List recipes, with the paper's table that each belongs to."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("recipe", "what", "paper"):
        table.add_column(title, no_wrap=title == "recipe", overflow="fold")
    for name in recipe_names():
        recipe = find_recipe(name)
        table.add_row(name, recipe.about, recipe.paper)
    Console().print(table)


def show(name: Annotated[str, RECIPE]) -> None:
    """Print all settings of a recipe as YAML, to edit as your own."""
    print(find_recipe(name).to_yaml(), end="")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or of comparisons.")],
    out: Out = None,
) -> int:
    """Rebuild the report of a comparison, or merge several into one."""
    from kronbit.lab.report.runs import find_runs
    from kronbit.lab.report.writing import write_report
    from kronbit.lab.training.files import make_folder

    merged = find_runs(runs)
    if out is None and len(runs) > 1:
        raise LabError("several runs are merged into a new folder: choose it with --out")
    folder = out or runs[0]
    make_folder(folder)
    titles = list(dict.fromkeys(run.recipe for run in merged))
    written = write_report(merged, folder, ", ".join(titles), _command_of(runs))
    show_runs(runs)
    print(f"report: {written}")
    return 0


def _command_of(runs: Sequence[Path]) -> str:
    """Return the command that made the comparison, or else the current one."""
    path = runs[0] / "summary.json"
    if len(runs) == 1 and path.is_file():
        with suppress(OSError, ValueError, KeyError):
            return str(json.loads(path.read_text(encoding="utf-8"))["command"])
    return command_line()


def errors(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A run's folder, or a file with an optimizer's state; default: the paper's "
            "synthetic matrix."
        ),
    ] = None,
    bits: Annotated[
        list[int] | None, typer.Option(help="Bit widths, repeatable; default: 4 and 8.")
    ] = None,
    order: Annotated[int, typer.Option(help="Order of the synthetic matrix.", min=2)] = 1200,
    matrices: Annotated[
        int, typer.Option(help="Number of preconditioners to analyse, largest first.", min=0)
    ] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder for figures.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Show the quantisation errors of preconditioners: the paper's tables and figures."""
    from kronbit.lab.quantisation.report import checkpoint_errors, synthetic_errors
    from kronbit.lab.quantisation.tables import show_errors
    from kronbit.lab.training.files import make_folder
    from kronbit.lab.training.world import find_device

    where = find_device(device)
    widths = tuple(bits or (4, 8))
    if not set(widths) <= {3, 4, 6, 8}:
        raise LabError(f"--bits must be 3, 4, 6 or 8; got {', '.join(map(str, widths))}")
    with Console(stderr=True).status("decomposing matrices ...") as status:
        tell = status.update
        shared: dict[str, Any] = {"bits": widths, "device": where, "tell": tell}
        if checkpoint is None:
            result = synthetic_errors(order=order, **shared)
        else:
            result = checkpoint_errors(checkpoint, matrices=matrices, **shared)
        written = []
        if out is not None:
            from kronbit.lab.quantisation.figures import draw_errors

            make_folder(out)
            written = draw_errors(result, out, tell=tell)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        show_errors(result, Console())
        print(*written, sep="\n", end="\n" if written else "")
    return 0


PLAN_EXAMPLES = (
    "Examples: kronbit plan llama2-7b --batch 64 --seq 256 --gpu 80GB --order 2048 "
    "--checkpointing --base adamw8bit  |  kronbit plan cifar100-swin-tiny --gpu 24GB  |  "
    "kronbit plan mypackage.models:make --batch 32 --json"
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset (gpt2-124m, llama-130m, llama-350m, llama2-7b, llama3-8b, llama2-70b, "
            "vit-b32, resnet50, swin-tiny), a recipe, a folder with a transformers config.json, "
            "or package.module:factory."
        ),
    ],
    batch: Annotated[int | None, typer.Option(help="Examples per pass.")] = None,
    seq: Annotated[int | None, typer.Option(help="Length of sequences.")] = None,
    image: Annotated[int | None, typer.Option(help="Side of images.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Memory of the GPU, e.g. 80GB (80 x 1024 MiB) or 24G.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="shampoo, caspr, kfac or adabk.")] = "shampoo",
    order: Annotated[
        int | None, typer.Option(help="max_order: the largest order of a preconditioner.")
    ] = None,
    base: Base = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of parameters: fp32 or bf16.")] = None,
    amp: Amp = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute layers in the backward pass.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--measure", help="Run one batch on the GPU to measure activations.")
    ] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> int:
    """Show the memory of a training for each method and bit width, and what fits."""
    from kronbit.lab.plan.planning import make_plan, to_json
    from kronbit.lab.plan.table import show as show_plan

    result = make_plan(
        model,
        batch=batch,
        length=seq,
        image=image,
        gpu=gpu,
        optimizer=optimizer,
        order=order,
        base=base,
        dtype=dtype,
        amp=amp,
        checkpointing=checkpointing,
        measured=measured,
        settings=parse_settings(settings or ()),
    )
    if as_json:
        print(json.dumps(to_json(result), indent=1))
    else:
        show_plan(result, Console())
    return 0
