"""``multiring doctor``: what a job will find on this host, before it is started."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from multiring.cli import output
from multiring.cli.findings import Finding, State, all_findings

STYLES = {State.ok: "green", State.note: "yellow", State.stop: "bold red"}


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check this host for what stops or slows a job; exit code 1 if something would stop one."""
    findings = all_findings()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        output.console().print(output.folded(_table(findings)))
    raise typer.Exit(int(any(finding.state is State.stop for finding in findings)))


def _table(findings: list[Finding]) -> Table:
    table = Table("about", "", "found", box=None, pad_edge=False)
    for finding in findings:
        style = STYLES[finding.state]
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\n{finding.remedy}", style)
        table.add_row(finding.about, Text(finding.state.value, style), found)
    return table
