"""Options shared by several subcommands, and helpers to apply them."""

from __future__ import annotations

import datetime as dt
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from kronbit.lab.errors import LabError
from kronbit.lab.files import make_folder
from kronbit.lab.recipe import parse_settings

if TYPE_CHECKING:
    from kronbit.lab.report.runs import Run

Out = Annotated[
    Path | None, Option("--out", help="Folder to write to; default: a new one in runs/.")
]
DataFolder = Annotated[
    Path | None,
    Option(
        "--data",
        envvar="KRONBIT_DATA",
        help="Folder with downloaded data sets; default: data, or that of the resumed run.",
    ),
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="key=value, repeatable: a setting of the recipe (lr, epochs, model.depth, "
        "data.length), an option of kronbit, or an option of the base.",
    ),
]
RECIPE = Argument(help="A recipe's name, or a YAML file of your own.")
Base = Annotated[str | None, Option(help="The first-order optimizer: adamw, sgd, nadamw, ...")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")]
Amp = Annotated[str | None, Option(help="Autocast: bf16, fp16 or off.")]
Compile = Annotated[bool, Option("--compile", help="Compile the network with torch.compile.")]
CudaGraph = Annotated[
    bool, Option("--cuda-graph", help="Replay the forward and backward pass as a CUDA graph.")
]
TensorBoard = Annotated[bool, Option("--tensorboard", help="Also write TensorBoard files.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def merge(settings: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Merge the options that were given with the settings of ``--set``; return both by name."""
    given = {name: value for name, value in options.items() if value is not None}
    return {**given, **parse_settings(settings or ())}


def output_folder(
    out: Path | None, name: str, resume: bool = False
) -> AbstractContextManager[Path]:
    """Return a context with ``out``, or a new folder in runs/, which is removed if it stays empty.

    Raises:
        LabError: If ``out`` is a file, or a folder with files that a new run would overwrite.
    """
    if out is None:
        return _new_folder(name)
    if out.exists() and not out.is_dir():
        raise LabError(f"--out {out} is a file: choose a folder")
    if not resume and out.exists() and any(out.iterdir()):
        raise LabError(f"{out} is not empty: choose another --out, or --resume")
    return nullcontext(out)


@contextmanager
def _new_folder(name: str) -> Iterator[Path]:
    runs, time = Path("runs"), dt.datetime.now().strftime("%Y%m%d-%H%M%S")
    make_folder(runs)
    # The name is taken if another run started in the same second, or the clock was set back.
    for suffix in chain([""], (f"-{number}" for number in count(2))):
        place = runs / f"{name}-{time}{suffix}"
        with suppress(FileExistsError):
            place.mkdir()
            break
    try:
        yield place
    finally:
        with suppress(OSError):
            place.rmdir()


def show_report(runs: Sequence[Run], folder: Path, title: str, command: str) -> None:
    """Write a report, and print the table of its runs."""
    from kronbit.lab.report.tables import show_table
    from kronbit.lab.report.writing import write_report

    written = write_report(runs, folder, title, command)
    show_table(runs, Console())
    print(f"report: {written}")


def command_line() -> str:
    """Return the current command line."""
    return shlex.join(["kronbit", *sys.argv[1:]])
