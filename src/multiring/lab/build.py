"""Making a lab: the keeper, then the wiring, then the record by which other processes find it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multiring.lab.cluster import KEEPER, NEEDS_ROOT, STATE, TOPOLOGY, Cluster, LabError, LabHost
from multiring.lab.directory import HOSTS, LABS, LOG, await_lock, clear
from multiring.lab.network import FABRIC, FORWARDER_SECONDS, Network, design, tap_names, wiring
from multiring.planning import topology_file
from multiring.planning.topology import Topology
from multiring.whole_files import replace

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "taskset": "util-linux"}
"""The programs that a lab needs, and the package of each."""

CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
"""Lists those that are built in or have been loaded."""

Namespaces = dict[str, str]
"""The paths of a host's namespaces, by kind."""


def obstacle() -> str | None:
    """Return why this user can make no lab on this machine; None if one can be made."""
    if os.geteuid() != 0:
        return NEEDS_ROOT
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"a lab needs the program {tool}: install {package}"
    tried = subprocess.run(["unshare", "--mount", "--uts", "--ipc", "--net", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"a lab needs namespaces, which this machine refuses: {tried.stderr.strip()}"
    return None


_unnamed = itertools.count()


def up(
    topology: Topology, name: str = "", *, congestion: str = "cubic", cores: int | None = None, detach: bool = False
) -> Cluster:
    """Make a lab; LabError if that is impossible, ValueError if the topology cannot be emulated.

    ``congestion`` is TCP's congestion control; ``cores`` binds each host to so many cores of the machine. With
    ``detach`` the lab outlives this process, otherwise it goes with it at the latest.
    """
    network = design(topology)
    name = name or f"{os.getpid()}-{next(_unnamed)}"
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name):
        raise LabError(f"a lab cannot be called {name!r}: use at most 64 letters, digits, dots, dashes and underscores")
    if reason := obstacle():
        raise LabError(reason)
    _check_congestion(congestion)
    cores_of = _divide_cores(len(network.hosts), cores)
    directory = LABS / name
    keeper = _start_keeper(directory)
    stays = False
    try:
        namespaces = _ask(keeper, name, network, topology_file.text(topology))
        _wire(network, keeper.pid, namespaces, congestion)
        hosts = (
            LabHost(host.name, host.addresses, host.ranks, cores, namespaces[host.name])
            for host, cores in zip(network.hosts, cores_of, strict=True)
        )
        cluster = Cluster(name, tuple(hosts), congestion, keeper.pid, keeper)
        _record(cluster)
        if detach:
            stays = True
            _tell(keeper, "detach")
        return cluster
    except BaseException:
        if stays:
            keeper.kill()  # the end of its input may be nothing to it by now
        keeper.communicate()  # the end of its input, at which it clears away
        if keeper.returncode != 0 and directory.exists():
            locked = await_lock(directory)
            if locked is not None:
                clear(directory)
                os.close(locked)
        raise


def _check_congestion(name: str) -> None:
    """LabError for one that the machine does not have, also not in a module, which asking for it loads."""
    with socket.socket() as tried:
        try:
            tried.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            there = ", ".join(CONGESTION_CONTROLS.read_text().split())
            raise LabError(f"there is no congestion control {name!r} here; there is {there}") from None


def _hosts_file(network: Network) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in network.hosts:
        lines.append(f"{host.addresses[0]} {host.name}")
        # Who takes connections over IPv6 sockets, as torch does, looks up such an address for its messages.
        lines.append(f"::ffff:{host.addresses[0]} {host.name}.lab")
    return "\n".join(lines) + "\n"


def _start_keeper(directory: Path) -> subprocess.Popen[str]:
    """The keeper makes the directory, too: so there is no moment at which the death of its maker leaves one."""
    return subprocess.Popen(
        ["unshare", "--net", sys.executable, "-m", KEEPER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )


def _tell(keeper: subprocess.Popen[str], line: str) -> None:
    assert keeper.stdin is not None
    keeper.stdin.write(line + "\n")
    keeper.stdin.flush()


def _ask(keeper: subprocess.Popen[str], name: str, network: Network, topology: str) -> dict[str, Namespaces]:
    """Let the keeper make the directory and the hosts; the namespaces of each."""
    delays = [(*tap_names(cable), cable.delay - FORWARDER_SECONDS) for cable in network.cables if cable.delay]
    files = {HOSTS: _hosts_file(network), TOPOLOGY: topology}
    with contextlib.suppress(BrokenPipeError):  # then it does not answer either
        _tell(keeper, json.dumps({"files": files, "hosts": [host.name for host in network.hosts], "delays": delays}))
    assert keeper.stdout is not None
    answer = keeper.stdout.readline()
    if not answer:
        raise LabError(f"the lab's keeper failed{_said(LABS / name / LOG)}")
    namespaces: dict[str, Namespaces] | None = json.loads(answer)
    if namespaces is None:
        raise LabError(f"there is a lab {name} already; remove it by multiring lab down --lab {name}")
    return namespaces


def _said(log: Path) -> str:
    return f":\n{log.read_text()}" if log.exists() else ""


def _wire(network: Network, keeper: int, namespaces: dict[str, Namespaces], congestion: str) -> None:
    nets = {host: paths["net"] for host, paths in namespaces.items()}
    inside = {**nets, FABRIC: f"/proc/{keeper}/ns/net"}
    for host, tool, lines in wiring(network, nets, congestion):
        words = ["nsenter", f"--net={inside[host]}", "--", tool, "-batch", "-"]
        done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True)
        if done.returncode != 0:
            said, _, number = done.stderr.strip().partition("\nCommand failed -:")
            where = f"host {host}" if host else "the fabric"
            raise LabError(f"{tool} {lines[int(number or 1) - 1]} failed in {where}: {said}")


def _divide_cores(hosts: int, cores: int | None) -> list[tuple[int, ...]]:
    """The cores of each host: the next ``cores`` ones, in turn."""
    if cores is None:
        return [()] * hosts
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= cores <= len(available):
        raise LabError(f"{cores} cores a host: this machine has {len(available)}")
    turn = itertools.cycle(available)
    return [tuple(itertools.islice(turn, cores)) for _ in range(hosts)]


def _record(cluster: Cluster) -> None:
    cases = "".join(f"  {shlex.quote(host.name)}) set -- {shlex.join(host.enter())} ;;\n" for host in cluster.hosts)
    cluster.ssh.write_text(
        f"#!/bin/sh\n# Stands in for ssh: executes a command on a host of lab {cluster.name}.\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=$1\nshift\ncommand=$*\ncase $host in\n"
        f"{cases}"
        f'  *) echo "lab {cluster.name} has no host $host" >&2; exit 255 ;;\n'
        'esac\nexec "$@" /bin/sh -c "$command"\n'
    )
    cluster.ssh.chmod(0o755)
    state: dict[str, Any] = {
        "hosts": [asdict(host) for host in cluster.hosts],
        "congestion": cluster.congestion,
        "keeper": cluster.keeper,
    }
    replace(cluster.directory / STATE, [json.dumps(state, indent=1).encode()])
