"""Using and removing labs, by any process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multiring.errors import MultiringError
from multiring.lab.directory import LABS, LOG, await_lock, clear, lock, processes
from multiring.lab.network import design
from multiring.planning import topology_file
from multiring.planning.topology import Topology

TOPOLOGY = "topology.toml"
STATE = "state.json"
"""Names of the files in a lab's directory that hold its topology and its state."""

KEEPER = "multiring.lab.keeper"
"""The module whose process holds a lab; its argument is the directory."""

NEEDS_ROOT = "a lab needs root, for network namespaces: run it with sudo"

NONE_UP = "no lab is up; make one by multiring lab up TOPOLOGY.toml"


class LabError(MultiringError):
    """A lab cannot be made or used as asked; the message says why and what to do."""


@dataclass(frozen=True)
class LabHost:
    """An emulated host: its name, the addresses of its cards, its ranks, its cores (none: all), and how to enter it."""

    name: str
    addresses: tuple[str, ...]
    ranks: int
    cores: tuple[int, ...]
    namespaces: dict[str, str]

    def enter(self) -> list[str]:
        """The words to put before a command to execute it on this host."""
        bound = ["taskset", "--cpu-list", ",".join(map(str, self.cores))] if self.cores else []
        return [*bound, "nsenter", *(f"--{kind}={path}" for kind, path in self.namespaces.items()), "--"]


@dataclass(frozen=True)
class Cluster:
    """A lab that is up. A context manager that removes it."""

    name: str
    hosts: tuple[LabHost, ...]
    congestion: str
    keeper: int
    _process: subprocess.Popen[str] | None = field(default=None, compare=False, repr=False)

    @property
    def directory(self) -> Path:
        return LABS / self.name

    @property
    def topology(self) -> Topology:
        """Return the topology as the file of the lab has it: numbers rounded to three digits."""
        return topology_file.load(self.directory / TOPOLOGY)

    @property
    def ssh(self) -> Path:
        """A script to use as ssh: called as ``script HOST COMMAND...``, it executes the command on that host."""
        return self.directory / "ssh"

    def host(self, name: str) -> LabHost:
        """The host of that name; LabError if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise LabError(f"lab {self.name} has no host {name!r}; it has {known}")

    def command(self, host: str, *words: str) -> list[str]:
        """The words that execute a command on ``host`` in the current directory."""
        return [*self.host(host).enter(), "env", f"--chdir={os.getcwd()}", *words]

    def run(self, host: str, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on ``host`` to its end, its output captured; CalledProcessError if it fails."""
        return subprocess.run(self.command(host, *words), capture_output=True, text=True, timeout=timeout, check=True)

    def launch_command(self, *words: str) -> list[str]:
        """The words that execute ``multiring run WORDS`` on the first host, for all hosts and their ranks."""
        slots = ",".join(f"{host.name}:{host.ranks}" for host in self.hosts)
        launcher = [sys.executable, "-m", "multiring", "run", "-H", slots, "--ssh", str(self.ssh)]
        threads = [] if "OMP_NUM_THREADS" in os.environ else ["env", f"OMP_NUM_THREADS={self._threads()}"]
        return self.command(self.hosts[0].name, *threads, *launcher, *words)

    def _threads(self) -> int:
        """The threads of a rank for which there are cores: the launcher would share out all of them on each host."""
        return max(1, len(os.sched_getaffinity(0)) // sum(host.ranks for host in self.hosts))

    def processes(self) -> dict[str, list[int]]:
        """The processes on each host."""
        found: dict[str, list[int]] = {host.name: [] for host in self.hosts}
        of_network = {os.stat(host.namespaces["net"]).st_ino: host.name for host in self.hosts}
        for pid in processes(self.directory):
            with contextlib.suppress(OSError):  # it has ended
                found[of_network[os.stat(f"/proc/{pid}/ns/net").st_ino]].append(pid)
        return found

    def carried(self) -> dict[str, tuple[int, int]]:
        """The bytes that the link of each host, rack and site has carried up and down so far, with their headers."""
        fabric = ["nsenter", f"--net=/proc/{self.keeper}/ns/net", "--"]
        listed = subprocess.run([*fabric, "ip", "-json", "-statistics", "link"], capture_output=True, check=True).stdout
        counted = {port["ifname"]: port["stats64"] for port in json.loads(listed)}
        totals: dict[str, tuple[int, int]] = {}
        for cable in design(self.topology).cables:
            stats = counted[cable.outer.interface]
            up, down = totals.get(cable.place, (0, 0))
            totals[cable.place] = up + stats["rx"]["bytes"], down + stats["tx"]["bytes"]
        return totals

    def close(self) -> None:
        """Remove the lab, and everything that runs on it."""
        remove(self.name)
        if self._process is not None:
            self._process.communicate()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find(name: str = "") -> Cluster:
    """The lab of that name that is up, or the only one there is; LabError otherwise."""
    directory = _existing(name)
    _check_root()
    cluster = _read(directory)
    locked = lock(directory)
    if locked is not None:
        os.close(locked)
        raise LabError(f"lab {directory.name} has ended by itself; {_clear_away(directory)}{_log(directory)}")
    return cluster


def clusters() -> list[str]:
    """The names of the labs that are up, or were not cleared away."""
    return sorted(entry.name for entry in LABS.iterdir()) if LABS.is_dir() else []


def remove(name: str = "") -> None:
    """Remove a lab (the only one if no name is given) and all that runs on it, whatever became of who made it."""
    directory = _existing(name)
    _check_root()
    locked = lock(directory)
    if locked is None:
        _kill_keeper(directory)
        locked = await_lock(directory)
    if locked is None:
        raise LabError(f"lab {directory.name}: its keeper does not end, or another process is removing it")
    try:
        clear(directory)
    finally:
        os.close(locked)


def _existing(name: str) -> Path:
    names = clusters()
    listed = f"there is {', '.join(names)}" if names else NONE_UP
    if name and name not in names:
        raise LabError(f"there is no lab {name!r}; {listed}")
    if not name and len(names) != 1:
        raise LabError(f"which lab? {listed}; choose one by --lab" if names else NONE_UP)
    return LABS / (name or names[0])


def _check_root() -> None:
    if os.geteuid() != 0:
        raise LabError(NEEDS_ROOT)


def _read(directory: Path) -> Cluster:
    file = directory / STATE
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        hosts = tuple(LabHost(**host) for host in state["hosts"])
        return Cluster(directory.name, hosts, state["congestion"], state["keeper"])
    except FileNotFoundError:
        raise LabError(f"lab {directory.name} is just being made or removed; else {_clear_away(directory)}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LabError(f"{file} is damaged; {_clear_away(directory)}") from None


def _clear_away(directory: Path) -> str:
    return f"clear it away by multiring lab down --lab {directory.name}"


def _log(directory: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        if said := (directory / LOG).read_text().strip():
            return f". {said}"
    return ""


def _kill_keeper(directory: Path) -> None:
    """Kill the process that `build` has started to hold the lab, and its forwarders, which have its command line."""
    command = b"\0".join([b"-m", KEEPER.encode(), bytes(directory), b""])
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                if (entry / "cmdline").read_bytes().endswith(command):
                    os.kill(int(entry.name), signal.SIGKILL)
