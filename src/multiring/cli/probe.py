"""``multiring probe``: measure the links between hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from multiring.cli.errors import one_line_errors
from multiring.cli.options import check_kept
from multiring.cli.run import HostFile, HostList, Python, Ssh, run
from multiring.job import pet


def register(app: typer.Typer) -> None:
    app.command(no_args_is_help=True)(probe)


def probe(
    context: typer.Context,
    hosts: HostList = None,
    hostfile: HostFile = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the topology file there, on the first host.")
    ] = None,
    ssh: Ssh = None,
    python: Python = sys.executable,
) -> None:
    """Measure the links between hosts, show them as a tree, and keep them for the jobs on these hosts."""
    with one_line_errors("probe"):
        if hosts is not None and hostfile is not None:
            raise ValueError(f"-H {hosts} and --hostfile {hostfile} do not go together: they are two lists of hosts")
        if hosts is None and hostfile is None and pet.read() == pet.TorchrunOptions():
            raise ValueError("which hosts? Give -H A:2,B:2 or --hostfile FILE")
        check_kept({"--output": output}, {"--hostfile": hostfile})
    program = ["-m", "multiring.cli.probe_rank", *(["--output", str(output)] if output else [])]
    run(context, program, hosts=hosts, hostfile=hostfile, ssh=ssh, python=python)
