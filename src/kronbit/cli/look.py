"""The subcommands ``recipes``, ``report``, ``errors`` and ``plan``."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Argument, Context, Option

from kronbit.cli import options
from kronbit.lab.errors import LabError
from kronbit.lab.recipe import find_recipe, parse_settings, recipe_names
from kronbit.lab.training.world import find_device

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


def recipes(context: Context) -> None:
    """List recipes, each with the table of the paper that it reproduces."""
    if context.invoked_subcommand is not None:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("recipe", "description", "paper"):
        table.add_column(title, no_wrap=title == "recipe", overflow="fold")
    for name in recipe_names():
        recipe = find_recipe(name)
        table.add_row(name, recipe.about, recipe.paper)
    Console().print(table)


def show(name: Annotated[str, options.RECIPE]) -> None:
    """Print all settings of a recipe as YAML, as a template for your own."""
    print(find_recipe(name).to_yaml(), end="")


def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs or of comparisons.")],
    out: options.Out = None,
) -> None:
    """Rebuild the report of a comparison, or merge several into one."""
    from kronbit.lab.report.runs import find_runs

    merged = find_runs(runs)
    if out is None and len(runs) > 1:
        raise LabError("several runs are merged into a new folder: choose it with --out")
    command = options.command_line()
    if len(runs) == 1:  # the summary of a comparison has its command
        with suppress(OSError, ValueError, KeyError):
            command = json.loads((runs[0] / "summary.json").read_text(encoding="utf-8"))["command"]
    title = ", ".join(dict.fromkeys(run.recipe for run in merged))
    options.show_report(merged, out or runs[0], title, command)


def errors(
    checkpoint: Annotated[
        Path | None,
        Argument(
            help="A run's folder, or a file with an optimizer's state; default: the paper's "
            "synthetic matrix."
        ),
    ] = None,
    bits: Annotated[
        list[int] | None, Option(help="Bit widths, repeatable; default: 4 and 8.")
    ] = None,
    order: Annotated[int, Option(help="Order of the synthetic matrix.", min=2)] = 1200,
    matrices: Annotated[
        int, Option(help="Number of preconditioners to analyse, largest first.", min=0)
    ] = 4,
    out: Annotated[Path | None, Option(help="Folder for figures.")] = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the quantisation errors of preconditioners: the paper's tables and figures."""
    from kronbit.lab.quantization.report import checkpoint_errors, synthetic_errors
    from kronbit.lab.quantization.tables import show_errors

    widths = tuple(bits or (4, 8))
    if not set(widths) <= {3, 4, 6, 8}:
        raise LabError(f"--bits must be 3, 4, 6 or 8; got {', '.join(map(str, widths))}")
    shared: dict[str, Any] = {"bits": widths, "device": find_device(device)}
    with Console(stderr=True).status("decomposing matrices ...") as status:
        shared["tell"] = status.update
        if checkpoint is None:
            result = synthetic_errors(order=order, **shared)
        else:
            result = checkpoint_errors(checkpoint, matrices=matrices, **shared)
        written = []
        if out is not None:
            from kronbit.lab.quantization.figures import draw_errors

            written = draw_errors(result, out, tell=status.update)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        show_errors(result, Console())
        for path in written:
            print(path)


PLAN_EXAMPLES = (
    "Examples: kronbit plan llama2-7b --batch 64 --seq 256 --gpu 80GB --order 2048 "
    "--checkpointing --base adamw8bit  |  kronbit plan cifar100-swin-tiny --gpu 24GB  |  "
    "kronbit plan mypackage.models:make --batch 32 --json"
)


def plan(
    model: Annotated[
        str,
        Argument(
            help="A preset (gpt2-124m, llama-130m, llama-350m, llama2-7b, llama3-8b, llama2-70b, "
            "vit-b32, resnet50, swin-tiny), a recipe, a folder with a transformers config.json, "
            "or package.module:factory."
        ),
    ],
    batch: Annotated[int | None, Option(help="Examples per pass.")] = None,
    seq: Annotated[int | None, Option(help="Sequence length, in tokens.")] = None,
    image: Annotated[int | None, Option(help="Side of the images, in pixels.")] = None,
    gpu: Annotated[
        str | None, Option(help="Memory of the GPU, e.g. 80GB (80 x 1024 MiB) or 24G.")
    ] = None,
    optimizer: Annotated[str, Option(help="shampoo, caspr, kfac or adabk.")] = "shampoo",
    order: Annotated[
        int | None, Option(help="max_order: the largest order of a preconditioner.")
    ] = None,
    base: options.Base = None,
    dtype: Annotated[str | None, Option(help="Dtype of parameters: fp32 or bf16.")] = None,
    amp: options.Amp = None,
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Recompute layers in the backward pass.")
    ] = False,
    measured: Annotated[
        bool, Option("--measure", help="Run one batch on the GPU to measure activations.")
    ] = False,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Show the memory of a training run for each method and bit width, and what fits."""
    from kronbit.lab.plan.planning import make_plan, to_json
    from kronbit.lab.plan.table import show as show_plan

    network: Any = {"batch": batch, "length": seq, "image": image, "dtype": dtype, "amp": amp}
    result = make_plan(
        model,
        gpu=gpu,
        optimizer=optimizer,
        order=order,
        base=base,
        checkpointing=checkpointing,
        measured=measured,
        settings=parse_settings(settings or ()),
        **network,
    )
    if as_json:
        print(json.dumps(to_json(result), indent=1))
    else:
        show_plan(result, Console())
