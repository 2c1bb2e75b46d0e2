"""The program of ``multiring probe`` on every rank: it measures the links, and shows them on rank 0."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from multiring import api
from multiring.cli.errors import USAGE_ERROR, call
from multiring.cli.options import why_not_written
from multiring.files import write_text
from multiring.job.bootstrap import rank_identity
from multiring.planning import topology_file


def main(
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the topology file there.")] = None,
) -> None:
    """Measure the links between the hosts of this job, whatever is known of them, and show them as a tree."""
    if output and rank_identity().rank == 0 and (reason := why_not_written(output)):
        typer.echo(f"multiring probe: --output {output}: {reason}", err=True)
        raise typer.Exit(USAGE_ERROR)
    world = api.init(probe="refresh", topology="").world
    alone, failed = len(set(world.topology.hosts)) == 1, False
    if world.rank == 0:
        if alone:
            print("one host: there are no links to measure" + (f" and none to write to {output}" if output else ""))
        elif world.known:
            print("\n".join(topology_file.outline(world.topology)))
            if output:
                failed = _write(output, topology_file.text(world.topology))
    api.shutdown()
    raise typer.Exit(int(failed or (not alone and not world.known)))


def _write(file: Path, text: str) -> bool:
    """Write a file, or say why that failed; return True if it failed."""
    try:
        write_text(file, text)
    except OSError as error:
        print(f"multiring probe: --output {file}: {error.strerror}", file=sys.stderr)
        return True
    return False


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
app.command()(main)
if __name__ == "__main__":
    call(app, "multiring run -m multiring.cli.probe_rank")
