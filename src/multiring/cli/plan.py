"""``multiring plan``: which plan a topology gets, what it is predicted to take, and why not another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from multiring.cli import output
from multiring.cli.errors import one_line_errors
from multiring.cli.options import whole, wire_of_environment
from multiring.env import parse_size, parse_wire
from multiring.planning import planner, topology_file
from multiring.planning.choice import Choice, record
from multiring.planning.plan import COLLECTIVES, ROOTED
from multiring.planning.planner import size_class
from multiring.planning.strategies import STRATEGIES
from multiring.planning.strategies import strategy as named
from multiring.planning.topology import Topology
from multiring.simulate import forced


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    topology: Annotated[Path, typer.Option(metavar="FILE", help="The topology, as TOML.")],
    size: Annotated[str, typer.Option(help="Size of the buffer, such as 4KB or 100MB; of all blocks together.")],
    collective: Annotated[str, typer.Option(help=f"One of {', '.join(COLLECTIVES)}.")] = "all_reduce",
    root: Annotated[int, typer.Option(parser=whole(0), metavar="RANK", help="The root of a broadcast or reduce.")] = 0,
    wire: Annotated[
        str | None,
        typer.Option(metavar="LEVEL=FORMAT", help="Such as rack=bfloat16, in the place of MULTIRING_WIRE."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"One of {', '.join(STRATEGIES)}, multiring:4x8x8, masters:16, as MULTIRING_PLAN."
        ),
    ] = "multiring",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the plan for a topology and a size, without running anything."""
    with one_line_errors("plan"):
        cluster, nbytes = topology_file.load(topology), size_class(_bytes(size, collective))
        if root and collective in COLLECTIVES and collective not in ROOTED:
            raise ValueError(f"--root {root}: {collective} has no root; leave it out")
        if wire and collective in COLLECTIVES and collective != "all_reduce":
            raise ValueError(f"--wire {wire}: only all_reduce travels narrow, and {collective} does not; leave it out")
        if strategy == "multiring":
            choice = planner.choose(cluster, collective, nbytes, root, _wire(wire, cluster))
        else:
            choice = _of_strategy(strategy, cluster, collective, nbytes, wire)
    if as_json:
        typer.echo(json.dumps(record(choice), indent=1))
        return
    output.console().print(choice)


def _of_strategy(name: str, topology: Topology, collective: str, nbytes: int, wire: str | None) -> Choice:
    found = named(name)
    if collective != "all_reduce":
        raise ValueError(f"--strategy {name} is a way to all_reduce; it has no {collective}")
    if wire:
        raise ValueError(f"--strategy {name} sends float32 as it is; leave out --wire {wire}")
    if wire is None and (narrow := wire_of_environment()):
        raise ValueError(f"--strategy {name} sends float32 as it is, which MULTIRING_WIRE={narrow} forbids: unset it")
    return forced.choose(topology, found, nbytes)


def _bytes(size: str, collective: str) -> int:
    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise ValueError(f"--size {size!r}: expected {error}") from None
    if nbytes == 0 and collective != "barrier":
        raise ValueError(f"--size {size}: of nothing nothing is sent; a size to plan for is 1 or more")
    return nbytes


def _wire(text: str | None, topology: Topology) -> planner.Wire:
    """The formats of --wire, or where it was not given, those of MULTIRING_WIRE."""
    if text is None:
        given = wire_of_environment()
        wire = parse_wire(given)
        try:
            planner.check_wire(wire, topology)
        except ValueError as error:
            raise ValueError(f"MULTIRING_WIRE={given}: {error}") from None
        return wire
    try:
        return parse_wire(text)
    except ValueError as error:
        raise ValueError(f"--wire {text!r}: expected {error}") from None
