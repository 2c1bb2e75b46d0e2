"""``multiring probe``: measure the links between hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from multiring.cli.run import SSH_COMMAND, HostFile, HostList, Python, Ssh, run


def register(app: typer.Typer) -> None:
    app.command(no_args_is_help=True)(probe)


def probe(
    context: typer.Context,
    hosts: HostList = None,
    hostfile: HostFile = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the topology file there, on the first host.")
    ] = None,
    ssh: Ssh = SSH_COMMAND,
    python: Python = sys.executable,
) -> None:
    """Measure the links between hosts, show them as a tree, and keep them for the jobs on these hosts."""
    program = ["-m", "multiring.cli.probe_rank", *(["--output", str(output)] if output else [])]
    run(context, program, hosts=hosts, hostfile=hostfile, ssh=ssh, python=python)
