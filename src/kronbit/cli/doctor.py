"""The subcommand ``kronbit doctor``."""

from __future__ import annotations

import json
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from kronbit.cli.options import Device, Json
from kronbit.lab.errors import lab_error
from kronbit.lab.training.world import find_device

EXAMPLES = (
    "Examples: kronbit doctor  |  kronbit doctor --optimizer kronbit.CASPR --options bits=8  |  "
    "kronbit doctor --optimizer torch.optim.AdamW --options lr=1e-3"
)


def doctor(
    optimizer: Annotated[
        str, Option("--optimizer", "-o", help="Import path of the optimizer.")
    ] = "kronbit.Shampoo",
    options: Annotated[str, Option(help="Options of the optimizer, e.g. bits=8,lr=1e-3.")] = "",
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Show what is installed, and check that an optimizer behaves as trainers expect.

    The exit code is 1 if a check fails.
    """
    from kronbit.integrations.strings import read_options
    from kronbit.lab.doctor.battery import CHECKS, examine
    from kronbit.lab.doctor.environment import describe
    from kronbit.lab.doctor.subject import subject_of

    where = find_device(device)
    with lab_error("--options", ValueError):
        given = read_options(options)
    subject = subject_of(optimizer, given)
    environment, console = describe(where), Console(quiet=as_json)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for row in environment:
        table.add_row(*row)
    console.print(table)
    console.print(f"\n{optimizer}:")
    checks = {}
    for check in CHECKS:
        checks[check] = examine(subject, where, check) or "ok"
        console.print(f"  {check}: {checks[check]}", markup=False, highlight=False)
    if as_json:
        print(json.dumps({"environment": dict(environment), "checks": checks}, indent=1))
    return int(any(outcome != "ok" for outcome in checks.values()))
