"""``multiring run``: start the ranks of a job."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from multiring import _native, env
from multiring.cli.errors import USAGE_ERROR
from multiring.cli.options import PROGRAM_FOLLOWS, check_program, ranks_option, whole
from multiring.errors import MultiringError
from multiring.job import pet
from multiring.job.cores import Binding
from multiring.launch import LaunchError, mpi
from multiring.launch.hosts import NAME, Assignment, HostEntry, is_here, parse_hosts, place, read_hostfile
from multiring.launch.join import HostMeeting
from multiring.launch.launcher import Job
from multiring.launch.pods import PodOptions, completed
from multiring.launch.program import resolve
from multiring.launch.ssh import ssh_command
from multiring.launch.start import run_as_typed, run_over_ssh
from multiring.net import interfaces

HostList = Annotated[str | None, typer.Option("-H", metavar="A:2,B:2", help="Hosts, each with its number of ranks.")]
HostFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Hosts from a file: a line 'a slots=2' or 'a:2' each.")
]
Ssh = Annotated[
    str | None,
    typer.Option(metavar="CMD", help="What reaches a host: called as CMD host command...", show_default="ssh"),
]
Python = Annotated[
    str,
    typer.Option(metavar="PATH", help="Python on hosts that are reached by ssh.", show_default="the path of this one"),
]


def register(app: typer.Typer) -> None:
    """Add the command; options after PROGRAM are its own."""
    app.command("run", context_settings=PROGRAM_FOLLOWS, no_args_is_help=True)(run)


def run(
    context: typer.Context,
    program: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM", help="train.py, -m module, or any command; its arguments follow."),
    ],
    ranks: Annotated[int | None, ranks_option("Number of ranks in total; all slots if hosts are given.")] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            "--nproc_per_node",
            parser=whole(1),
            metavar="N",
            help="Number of ranks on each host, as torchrun has it.",
        ),
    ] = None,
    hosts: HostList = None,
    hostfile: HostFile = None,
    ssh: Ssh = None,
    python: Python = sys.executable,
    count_or_list: Annotated[
        str | None,
        typer.Option("--hosts", metavar="N", help="Number of hosts on which this command is typed, without ssh."),
    ] = None,
    host_index: Annotated[
        int | None, typer.Option(parser=whole(0), metavar="N", help="Index of this host; host 0 runs rank 0.")
    ] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="A:PORT", help="Address at which host 0 listens.")] = None,
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The links between the hosts, which are then not measured.")
    ] = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt what ranks say to each other and to the launcher's store by TCP.")
    ] = False,
    launcher: Annotated[
        mpi.SiteLauncher | None, typer.Option(help="Let the site's own launcher start the ranks.")
    ] = None,
    bind: Annotated[
        Binding, typer.Option(help="Bind ranks to their share of the cores, or of NUMA domains.")
    ] = Binding.core,
    max_restarts: Annotated[
        int, typer.Option(parser=whole(0), metavar="N", help="Times that all ranks may be restarted after a failure.")
    ] = 0,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            parser=whole(1),
            metavar="M",
            help="Keep the job running while at least M ranks are left; the program calls shrink.",
        ),
    ] = None,
    max_replacements: Annotated[
        int,
        typer.Option(parser=whole(0), metavar="N", help="Lost ranks to start again, in total; the program calls grow."),
    ] = 0,
    standby: Annotated[
        int,
        typer.Option(
            parser=whole(0),
            metavar="K",
            help="Keep K processes on each host, forked where the script's imports are done, to be such ranks at once.",
        ),
    ] = 0,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="Do the script's imports once on each host, and fork its ranks there but rank 0."),
    ] = False,
    spares: Annotated[
        str | None,
        typer.Option(metavar="C:2,D:2", help="Hosts that take the places of hosts that are lost, reached by ssh too."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write each rank's output to rank-N.log there.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show where each rank runs.")] = False,
    summary: Annotated[
        bool, typer.Option("--summary/--no-summary", help="End with three lines: how long ranks waited, and for whom.")
    ] = True,
) -> None:
    """Start the ranks of a job, here or on many hosts.

    Rank 0 keeps the terminal; each line of the others bears their rank. The first failure ends the job.
    """
    try:
        _check_directory()
        if topology is not None:
            os.environ["MULTIRING_TOPOLOGY"] = str(topology.absolute())
        if encrypt:
            os.environ["MULTIRING_ENCRYPT"] = "1"
        hosts, host_count = _hosts(hosts, count_or_list)
        listed = {"-H": hosts, "--hostfile": hostfile}
        given = PodOptions(ranks, host_count, host_index, rendezvous, ranks_per_host)
        is_free = launcher is None and hosts is None and hostfile is None
        ranks, host_count, host_index, rendezvous, ranks_per_host = astuple(
            completed(given, pet.read() if is_free else pet.TorchrunOptions())
        )
        typed = {"--hosts": host_count, "--host-index": host_index, "--rendezvous": rendezvous}
        _check(context, program, typed, listed)
        if ranks_per_host is not None and not is_free:
            raise LaunchError(
                f"--nproc-per-node {ranks_per_host} is for hosts that are not listed: -H a:{ranks_per_host},b:"
                f"{ranks_per_host} lists them with their ranks, and -n is the number in total"
            )
        _check_settings()
        own = {
            "--bind": bind is not Binding.core,
            "--max-restarts": max_restarts,
            "--min-ranks": min_ranks,
            "--max-replacements": max_replacements,
            "--standby": standby,
            "--fork": fork,
            "--spares": spares,
            "--log-dir": log_dir,
            "--python": python != sys.executable,
        }
        if launcher is not None:
            _check_launcher(launcher.value, [name for name, value in {**own, **typed}.items() if value])
            _become(launcher.value, program, _assignments(ranks, hosts, hostfile), listed=bool(hosts or hostfile))
        are_hosts_listed = hosts is not None or hostfile is not None
        _check_recovery(min_ranks, max_replacements, standby, spares, are_hosts_listed=are_hosts_listed)
        job = Job(
            tuple(program),
            bind.value,
            max_restarts,
            log_dir,
            verbose,
            min_ranks,
            max_replacements,
            standby,
            fork,
            summary,
        )
        if host_count is not None and host_index is not None and rendezvous is not None:
            total, meeting = _meeting(ranks, host_count, host_index, rendezvous)
            _check_min_ranks(min_ranks, total)
            code = run_as_typed(job, total, meeting, _note)
        else:
            assignments = _assignments(ranks, hosts, hostfile)
            world_size = sum(assignment.count for assignment in assignments)
            _check_min_ranks(min_ranks, world_size)
            others = parse_hosts(spares, "--spares") if spares is not None else []
            names = [*(assignment.host for assignment in assignments), *(spare.name for spare in others)]
            _check_python(python, context.command.name, names)
            if world_size > 1:  # one alone needs no interface
                _check_interface(names)
            code = run_over_ssh(job, assignments, others, _words(ssh), python, _note)
    except (MultiringError, ValueError) as error:
        typer.echo(f"multiring {context.command.name}: {error}", err=True)
        code = USAGE_ERROR
    raise typer.Exit(code)


def _hosts(hosts: str | None, count_or_list: str | None) -> tuple[str | None, int | None]:
    """The list of -H, and the number of --hosts, which may be such a list too, as horovodrun has it."""
    if count_or_list is None:
        return hosts, None
    if count_or_list.isdecimal():
        return hosts, env.named_number("--hosts", count_or_list, 1, env.MOST_RANKS)
    if hosts is not None:
        raise LaunchError(f"-H {hosts} and --hosts {count_or_list} do not go together: they are two lists of hosts")
    return count_or_list, None


def _check_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(f"the current directory, in which the ranks would start: {error.strerror}") from None


def _check_settings() -> None:
    """ValueError for a MULTIRING_WIRE or MULTIRING_PLAN that every rank would refuse; ResourceError likewise."""
    settings = env.read(env.Settings)
    if settings.encrypt:
        _native.load_libcrypto()
    wire = env.parse_wire(settings.wire)
    if isinstance(wire, dict):
        from multiring.planning import planner  # as below

        try:
            planner.check_wire_words(wire)
        except ValueError as error:
            raise ValueError(f"MULTIRING_WIRE={settings.wire}: {error}") from None
    if settings.plan:
        from multiring.simulate import forced  # NumPy and the planner, which a launcher seldom needs

        forced.wanted(settings.plan, settings.wire)


def _check_launcher(launcher: str, given: list[str]) -> None:
    if given:
        raise LaunchError(f"{' and '.join(given)} and --launcher do not go together: {launcher} starts the ranks then")


def _become(launcher: str, program: list[str], assignments: list[Assignment], *, listed: bool) -> NoReturn:
    """Turn this process into the launcher."""
    said = mpi.version(launcher)
    resolved = resolve(program, os.getcwd(), os.environ)
    words = mpi.command(launcher, said, assignments, resolved, listed=listed, root=os.geteuid() == 0)
    os.execvp(words[0], words)


def _words(ssh: str | None) -> Sequence[str]:
    if ssh is None:
        return ssh_command(env.read(env.Settings).heartbeat_timeout)
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise LaunchError(f"--ssh {ssh}: {error}") from None
    if not words:
        raise LaunchError("--ssh needs a command")
    return words


def _note(text: str) -> None:
    typer.echo(f"multiring: {text}", err=True)


def _check(
    context: typer.Context, program: list[str], typed: Mapping[str, object], listed: Mapping[str, object]
) -> None:
    check_program(context, program)
    if program == ["-m"]:
        raise LaunchError("-m needs the name of a module")
    given = [name for name, value in {**typed, **listed}.items() if value is not None]
    if len(given) > 1 and set(given) != set(typed):
        raise LaunchError(
            f"{' and '.join(given)} do not go together: give -H, or --hostfile, or all of {', '.join(typed)}"
        )
    if len(given) == 1 and given[0] in typed:
        raise LaunchError(f"{given[0]} needs {' and '.join(name for name in typed if name != given[0])} too")


def _check_recovery(
    min_ranks: int | None, max_replacements: int, standby: int, spares: str | None, *, are_hosts_listed: bool
) -> None:
    """LaunchError for options about lost ranks of which one needs another."""
    if max_replacements and min_ranks is None:
        raise LaunchError(
            f"--max-replacements {max_replacements} needs --min-ranks M: while so many ranks are left, others are "
            "replaced"
        )
    if standby and not max_replacements:
        raise LaunchError(
            f"--standby {standby} needs --max-replacements N: standbys take the places of ranks that are replaced"
        )
    if spares is not None and not max_replacements:
        raise LaunchError(
            f"--spares {spares} needs --max-replacements N: the ranks of a lost host start again there, as replacements"
        )
    if spares is not None and not are_hosts_listed:
        raise LaunchError(f"--spares {spares} needs the hosts of the job by -H or --hostfile")


def _check_python(python: str, command: str | None, names: Sequence[str]) -> None:
    """LaunchError for a Python of hosts that are reached by ssh where there are none."""
    if python != sys.executable and all(map(is_here, names)):
        raise LaunchError(
            f"--python {python} is for hosts that are reached by ssh, and there are none: start multiring by "
            f"that Python ({python} -m multiring {command} ...)"
        )


def _check_interface(names: Sequence[str]) -> None:
    """ValueError for a MULTIRING_INTERFACE that this host does not have, where it has all ranks."""
    interface = env.read(env.Settings).interface
    if interface and all(map(is_here, names)):
        interfaces.reachable(interface)


def _check_min_ranks(min_ranks: int | None, world_size: int) -> None:
    if min_ranks is not None and min_ranks > world_size:
        raise LaunchError(f"--min-ranks {min_ranks} of {world_size} ranks: the job could not even begin")


def _meeting(ranks: int | None, hosts: int, index: int, rendezvous: str) -> tuple[int, HostMeeting]:
    if ranks is None:
        raise LaunchError("how many ranks? Give -n N, the total, on all hosts")
    if ranks < hosts:
        raise LaunchError(f"-n {ranks} ranks on --hosts {hosts}: give at least one rank for each host")
    if index >= hosts:
        raise LaunchError(f"--host-index {index} of --hosts {hosts}: hosts count from 0")
    match = re.fullmatch(NAME + r":(?P<port>[0-9]{1,5})", rendezvous)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise LaunchError(f"--rendezvous {rendezvous}: expected host:port, an IPv6 address in brackets")
    settings = env.read(env.Settings)
    meeting = HostMeeting(
        env.split_address(rendezvous), hosts, index, seconds=settings.init_timeout, encrypt=settings.encrypt
    )
    return ranks, meeting


def _assignments(ranks: int | None, hosts: str | None, hostfile: Path | None) -> list[Assignment]:
    if hosts is not None:
        return place(parse_hosts(hosts), ranks)
    if hostfile is not None:
        return place(read_hostfile(hostfile), ranks)
    if ranks is None:
        raise LaunchError("how many ranks? Give -n N, or hosts by -H or --hostfile")
    return place([HostEntry(socket.gethostname(), ranks)], ranks)
