"""`tandem doctor`: what this machine's GPUs lack, in sentences."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.cli.errors import FAILED
from engine.cuda.doctor import Finding, Level, findings
from engine.cuda.machine import look

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Say what keeps this machine's GPUs from being used; status 1 if something does."""
    found = findings(look())
    if as_json:
        typer.echo(json.dumps([{"level": each.level.value, "sentence": each.sentence} for each in found], indent=2))
    else:
        _print(Console(highlight=False), found)
    if any(each.level is Level.PROBLEM for each in found):
        raise typer.Exit(FAILED)


def _print(console: Console, found: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for each in found:
        table.add_row(Text(each.level.value, _STYLES[each.level]), Text(each.sentence))
    console.print(table)
