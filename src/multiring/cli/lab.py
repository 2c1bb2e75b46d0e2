"""``multiring lab``: an emulated cluster on this machine."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from multiring import lab
from multiring.bench.contestants import Measurable
from multiring.bench.peers import ONE_HOST, PEERS, installed
from multiring.cli.comparison import (
    Collective,
    Comparison,
    Json,
    Launches,
    Plot,
    Replay,
    Replayed,
    Samples,
    Seconds,
    Site,
    Sizes,
    Speed,
    Steps,
    ThroughApi,
    check_kind,
    choose_peers,
    recording_of,
)
from multiring.cli.errors import one_line_errors
from multiring.cli.options import PROGRAM_FOLLOWS, check_kept, whole
from multiring.lab import Cluster, LabError, peers
from multiring.planning import topology_file
from multiring.planning.topology import LEVELS, Place
from multiring.units import count

Name = Annotated[str, typer.Option("--lab", metavar="NAME", help="Which lab.", show_default="the only one")]

ON_A_LAB = [peer for peer in PEERS if peer not in ONE_HOST]
"""The peers that can be measured on a lab."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="An emulated cluster on this machine, made from a topology file.")
    group.command("up")(up)
    group.command("run", context_settings=PROGRAM_FOLLOWS, no_args_is_help=True)(run)
    group.command("peers")(compare)
    group.command("status")(status)
    group.command("down")(down)
    app.add_typer(group, name="lab")


def up(
    file: Annotated[Path, typer.Argument(metavar="TOPOLOGY.toml", help="What to emulate.")],
    name: Annotated[
        str, typer.Option("--lab", metavar="NAME", help="What to call it.", show_default="as the file")
    ] = "",
    cores: Annotated[
        int | None,
        typer.Option(parser=whole(1), metavar="N", help="Cores of this machine for each host.", show_default="all"),
    ] = None,
    congestion: Annotated[str, typer.Option(help="TCP's congestion control on the lab.")] = "cubic",
) -> None:
    """Make a lab. It stays until `multiring lab down`."""
    with one_line_errors("lab up"):
        topology = topology_file.load(file)
        cluster = lab.up(topology, name or file.stem, congestion=congestion, cores=cores, detach=True)
        try:
            _show(cluster)
        except BrokenPipeError:  # after `| head` it is up all the same
            raise
        except BaseException:
            cluster.close()
            raise


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
    with one_line_errors("lab run"):
        cluster = lab.find(name)
        command = cluster.command(on, *words) if on else cluster.launch_command(*words)
        os.execvp(command[0], command)


def compare(
    context: typer.Context,
    name: Name = "",
    wanted: Annotated[
        str, typer.Option("--peers", help=f"Which: {', '.join(ON_A_LAB)}.", show_default="those here")
    ] = "",
    collective: Collective = Measurable.all_reduce,
    sizes: Sizes = "4KB,256KB,8MB",
    api: ThroughApi = None,
    launches: Launches = 5,
    seconds: Seconds = 2.0,
    json_file: Json = None,
    plot: Plot = None,
    replayed: Replayed = None,
    samples: Samples = 32,
    speed: Speed = 32.0,
    steps: Steps = 5,
) -> None:
    """Measure collectives, or training steps, on a lab, ours beside those of the peers."""
    with one_line_errors("lab peers"):
        check_kind(context, replayed)
        check_kept({"--json": json_file}, {"--replay": Path(replayed or "")})
        named = choose_peers(wanted, ON_A_LAB) if wanted else [peer for peer in installed() if peer in ON_A_LAB]
        measurement = (
            Comparison(collective.value, sizes, api, named, launches, seconds, json_file, plot)
            if replayed is None
            else Replay(recording_of(context, replayed, samples, speed), api, named, launches, steps, json_file)
        )
        measurement.check()
        cluster = lab.find(name)
        topology = cluster.topology
        settings = {
            "congestion": cluster.congestion,
            "cores_of_hosts": {host.name: host.cores for host in cluster.hosts},
        }
        start = partial(peers.start, cluster)
        measurement.run(Site(f"on lab {cluster.name}", topology.world_size, start, topology, settings))


def status(name: Name = "") -> None:
    """Show the labs that are up, and what runs on them."""
    with one_line_errors("lab status"):
        failed = []
        for each in [name] if name else lab.clusters():
            try:
                _show(lab.find(each))
            except LabError as error:
                failed.append(str(error))
        if failed:
            raise LabError("\n".join(failed))
        if not name and not lab.clusters():
            typer.echo(lab.NONE_UP)


def down(name: Name = "") -> None:
    """Remove a lab and everything that runs on it."""
    with one_line_errors("lab down"):
        lab.remove(name)


def _show(cluster: Cluster) -> None:
    topology = cluster.topology
    typer.echo(
        f"lab {cluster.name}: {count(len(cluster.hosts), 'host')}, {count(topology.world_size, 'rank')}, "
        f"TCP congestion control {cluster.congestion}"
    )
    running = cluster.processes()

    def show(place: Place, height: int, indent: str) -> None:
        about = [f"{indent}{LEVELS[height]} {place.name}", topology_file.describe(place)]
        if height == 1:
            host = cluster.host(place.name)
            about += [*host.addresses, count(host.ranks, "rank")]
            about += [f"cores {','.join(map(str, host.cores))}"] if host.cores else []
            about += [count(len(running[host.name]), "process")] if running[host.name] else []
        typer.echo(", ".join(about))
        for inner in place.places if height > 1 else ():
            show(inner, height - 1, indent + "  ")

    for place in topology.places:
        show(place, len(topology.levels) - 1, "  ")
