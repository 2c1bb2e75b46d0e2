"""``multiring lab``: an emulated cluster on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from multiring import lab, topology_file
from multiring.bench import parse_sizes, report
from multiring.bench.contestants import Api
from multiring.bench.launches import alternate
from multiring.bound import cut_bound
from multiring.lab import Cluster, LabError, peers
from multiring.topology import LEVELS, Place
from multiring.units import duration, size

USAGE_ERROR = 2

Name = Annotated[str, typer.Option("--lab", metavar="NAME", help="Which lab.", show_default="the only one")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="An emulated cluster on this machine, made from a topology file.")
    options_of_the_program = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    group.command("up")(up)
    group.command("run", context_settings=options_of_the_program, no_args_is_help=True)(run)
    group.command("peers")(compare)
    group.command("status")(status)
    group.command("down")(down)
    app.add_typer(group, name="lab")


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    try:
        yield
    except subprocess.CalledProcessError as error:  # it has said why
        raise typer.Exit(error.returncode) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (LabError, ValueError) as error:
        reason = str(error)
    else:
        return
    typer.echo(f"multiring lab {command}: {reason}", err=True)
    raise typer.Exit(USAGE_ERROR)


def up(
    file: Annotated[Path, typer.Argument(metavar="TOPOLOGY.toml", help="What to emulate.")],
    name: Annotated[
        str, typer.Option("--lab", metavar="NAME", help="What to call it.", show_default="as the file")
    ] = "",
    cores: Annotated[
        int | None, typer.Option(min=1, help="Bind each host to so many cores of this machine.", show_default="all")
    ] = None,
    congestion: Annotated[str, typer.Option(help="TCP's congestion control on the lab.")] = "cubic",
) -> None:
    """Make a lab. It stays until `multiring lab down`."""
    with _one_line_errors("up"):
        topology = topology_file.load(file)
        _show(lab.up(topology, name or file.stem, congestion=congestion, cores=cores, detach=True))


def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM", help="As for multiring run, whose options may stand before it."),
    ],
    name: Name = "",
    on: Annotated[
        str, typer.Option(metavar="HOST", help="Only execute a command on this host, without the launcher.")
    ] = "",
) -> None:
    """Run a program on every rank of a lab, by `multiring run` on its first host."""
    with _one_line_errors("run"):
        cluster = lab.find(name)
        command = cluster.command(on, *words) if on else cluster.launch_command(*words)
        os.execvp(command[0], command)


def compare(
    name: Name = "",
    wanted: Annotated[
        str, typer.Option("--peers", help=f"Which: {', '.join(peers.PEERS)}.", show_default="those installed")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Sizes of the buffer.")] = "4KB,256KB,8MB",
    api: Annotated[
        Api | None, typer.Option(help="What multiring is called through. [default: torch beside Gloo, else numpy]")
    ] = None,
    launches: Annotated[int, typer.Option(min=1, help="How often each is launched, in turns.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to measure each size in a launch.")] = 2.0,
) -> None:
    """Measure all-reduces on a lab, ours beside those of the peers."""
    with _one_line_errors("peers"):
        nbytes_of_each = _parse_sizes(sizes)
        named = _choose_peers(wanted)
        cluster = lab.find(name)
        api = api or (Api.torch if "gloo" in named else Api.numpy)
        options = ["--sizes", sizes, "--api", api.value, "--seconds", str(seconds)]
        figures = alternate(["multiring", *named], launches, partial(peers.start, cluster), options)
        topology = cluster.topology
        rows = report.summarise(figures.pop("multiring"), figures, topology.world_size)
        title = f"all_reduce on lab {cluster.name}, float32, through {api.value}, median of {launches} launches"
        Console().print(report.table(rows, title))
        for nbytes in nbytes_of_each:
            bound = cut_bound(topology, "all_reduce", nbytes)
            typer.echo(f"{size(nbytes)}: the links allow no less than {duration(bound)}")


def _parse_sizes(text: str) -> list[int]:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise ValueError(f"--sizes {text}: expected {error}") from None


def _choose_peers(wanted: str) -> list[str]:
    installed = peers.installed()
    named = wanted.split(",") if wanted else installed
    for peer in named:
        if peer not in installed:
            raise LabError(f"--peers {wanted}: {peer!r} is not here; installed: {', '.join(installed) or 'none'}")
    return named


def status(name: Name = "") -> None:
    """Show the labs that are up, and what runs on them."""
    with _one_line_errors("status"):
        for each in [name] if name else lab.clusters():
            _show(lab.find(each))


def down(name: Name = "") -> None:
    """Remove a lab and everything that runs on it."""
    with _one_line_errors("down"):
        lab.remove(name)


def _show(cluster: Cluster) -> None:
    topology = cluster.topology
    typer.echo(
        f"lab {cluster.name}: {len(cluster.hosts)} hosts, {topology.world_size} ranks, TCP congestion control "
        f"{cluster.congestion}"
    )
    running = cluster.processes()

    def show(place: Place, height: int, indent: str) -> None:
        about = [f"{indent}{LEVELS[height]} {place.name}", topology_file.describe(place)]
        if height == 1:
            host = cluster.host(place.name)
            about += [*host.addresses, f"{host.ranks} rank{'s' if host.ranks > 1 else ''}"]
            about += [f"cores {','.join(map(str, host.cores))}"] if host.cores else []
            about += [f"{len(running[host.name])} processes"] if running[host.name] else []
        typer.echo(", ".join(about))
        for inner in place.places if height > 1 else ():
            show(inner, height - 1, indent + "  ")

    for place in topology.places:
        show(place, len(topology.levels) - 1, "  ")
