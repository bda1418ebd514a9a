"""The command ``kronbit``: its subcommands, errors and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from kronbit import __version__
from kronbit.cli import doctor, look, train
from kronbit.lab.errors import LabError

app = typer.Typer(
    name="kronbit",
    epilog="Exit codes: 0 success, 1 error (one line on stderr), 2 wrong usage, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="List recipes, or show one.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. A user error is printed on stderr as one line.

    Args:
        arguments: Command line without the command name.
    """
    if "" not in sys.path:
        sys.path.append("")  # the user's packages may be in the working directory
    command = typer.main.get_command(app)
    try:
        result = command.main(list(arguments), prog_name="kronbit", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except LabError as error:
        return _fail(str(error), 1)
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        return _fail(f"out of memory: {reason}; try --set batch=... or --set micro_batch=...", 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except Exception as error:
        if hasattr(error, "format_message"):  # raised by click, or by typer's copy of click
            message = error.format_message().rstrip(".")
            if not message:  # no arguments: the help was shown
                return 2
            path = getattr(getattr(error, "ctx", None), "command_path", "kronbit")
            return _fail(f"{message}; see {path} --help", 2)
        raise


def _fail(message: str, code: int) -> int:
    print(f"kronbit: error: {message}", file=sys.stderr)
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kronbit {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, compare, plan and report: second-order optimizers whose state takes 4 bits."""


app.command(epilog=train.TRAIN_EXAMPLES)(train.train)
app.command(epilog=train.COMPARE_EXAMPLES)(train.compare)
app.command(epilog=look.REPORT_EXAMPLES)(look.report)
app.command(epilog=look.PLAN_EXAMPLES)(look.plan)
app.command(epilog=look.ERRORS_EXAMPLES)(look.errors)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
recipes_app.callback(epilog=look.RECIPES_EXAMPLES)(look.recipes)
recipes_app.command(epilog=look.SHOW_EXAMPLES)(look.show)
