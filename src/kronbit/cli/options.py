"""Options shared by several subcommands, and helpers to apply them."""

from __future__ import annotations

import datetime as dt
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kronbit.lab.errors import LabError
from kronbit.lab.training.files import make_folder

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder to write to; default: a new one in runs/.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="KRONBIT_DATA",
        help="Folder with downloaded data sets; default: data, or that of the resumed run.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="key=value, repeatable: a setting of the recipe (lr, epochs, model.depth, "
        "data.length), an option of kronbit, or an option of the base.",
    ),
]
RECIPE = typer.Argument(help="A recipe's name, or a YAML file of your own.")
Base = Annotated[
    str | None, typer.Option(help="The first-order optimizer: adamw, sgd, nadamw, ...")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")
]
Amp = Annotated[str | None, typer.Option(help="Autocast: bf16, fp16 or off.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")]
CudaGraph = Annotated[
    bool, typer.Option("--cuda-graph", help="Replay forward and backward pass as a CUDA graph.")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files, too.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def drop_none(**values: Any) -> dict[str, Any]:
    """Return the options that are not ``None``."""
    return {name: value for name, value in values.items() if value is not None}


def refuse_used_folder(out: Path | None, resume: bool) -> None:
    """Raise if ``out`` is a file, or a folder with files that a new run would overwrite."""
    if out is None or not out.exists():
        return
    if not out.is_dir():
        raise LabError(f"--out {out} is a file: choose a folder")
    if any(out.iterdir()) and not resume:
        raise LabError(f"{out} is not empty: choose another --out, or --resume")


@contextmanager
def output_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Yield ``out``, or a new folder in runs/, which is removed if it stays empty."""
    if out is not None:
        yield out
        return
    stem = f"{name}-{dt.datetime.now().strftime('%Y%m%d-%H%M%S')}"
    # The name may be taken: by a run of the same second, or if the clock was set back.
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    place = next(filter(_claim, map(Path("runs").joinpath, names)))
    try:
        yield place
    finally:
        with suppress(OSError):
            place.rmdir()


def _claim(place: Path) -> bool:
    """Create a folder; return False if it exists."""
    make_folder(place.parent)
    try:
        place.mkdir()
    except FileExistsError:
        return False
    return True


def show_runs(folders: Sequence[Path]) -> None:
    """Print the table that ends a training or a comparison."""
    from kronbit.lab.report.runs import find_runs
    from kronbit.lab.report.tables import show_table

    show_table(find_runs(folders), Console())


def command_line() -> str:
    """Return the current command line."""
    return shlex.join(["kronbit", *sys.argv[1:]])
