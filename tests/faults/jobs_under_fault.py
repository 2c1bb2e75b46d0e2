"""A job of victims: started on this machine or on a lab, hurt by a fault, and judged by what became of every rank.

Ranks are forked (`fork_server`) and then enter their host, but for those that lack something.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from fair_time import FAIR

from multiring.lab import Cluster

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "helpers"))  # scripts of this directory are run without the paths of pytest
import fork_server  # noqa: E402

SOURCE = HERE.parents[1] / "src"
START_SECONDS, END_SECONDS = 60.0, 30.0
"""Fair ones, as are all limits here."""

ENTER = """
import ctypes, json, os, sys
cores, namespaces, sys.argv = json.loads(sys.argv[1])
directory = os.getcwd()
if cores:
    os.sched_setaffinity(0, cores)
entered = [os.open(path, os.O_RDONLY) for path in namespaces]
for namespace in entered:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
os.chdir(directory)
"""
"""Code by which a forked process enters its host, as a command does by `Cluster.command`."""

FILE = """
sys.path[0] = os.path.dirname(sys.argv[0])
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""

STORE = """
from multiring.job.store import Server
server = Server(open(sys.argv[1], "rb").read(), job="faults", bind=[sys.argv[2]])
print(",".join(server.addresses), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class World:
    """Names of the ranks' hosts, and the lab that has these hosts (None: this machine)."""

    hosts: tuple[str, ...]
    cluster: Cluster | None = None

    @property
    def size(self) -> int:
        return len(self.hosts)

    def command(self, host: str, *words: str) -> list[str]:
        return self.cluster.command(host, *words) if self.cluster else list(words)

    def entry(self, host: str, *words: str) -> str:
        """The word with which `ENTER` finds its host and its own words."""
        there = self.cluster.host(host) if self.cluster else None
        return json.dumps([there.cores if there else (), list(there.namespaces.values()) if there else [], words])

    @property
    def address(self) -> str:
        return self.cluster.host(self.hosts[0]).addresses[0] if self.cluster else "127.0.0.1"


@dataclass
class Job:
    """The processes of one job of victims, and what they leave in a folder of theirs."""

    world: World
    folder: Path
    store: fork_server.Forked
    ranks: list[subprocess.Popen[str] | fork_server.Process] = field(default_factory=list)

    def signal(self, rank: int, number: int) -> None:
        self.ranks[rank].send_signal(number)

    def order(self, rank: int, what: str) -> None:
        """Make a rank misbehave after its next step."""
        partial = self.folder / f"order-{rank}.part"
        partial.write_text(what)
        partial.rename(self.folder / f"order-{rank}")

    def write(self, name: str) -> None:
        (self.folder / name).touch()

    def await_line(self, rank: int, line: str, timeout: float) -> None:
        """Wait until a rank has written that line to its log."""
        log = self.folder / f"{rank}.log"
        began = time.time()
        while line not in log.read_text().splitlines():
            assert FAIR.between(began, time.time()) < timeout, (
                f"rank {rank} has not said {line!r} in {timeout:g} s\n{self.log(rank)}"
            )
            assert self.ranks[rank].poll() is None or line in log.read_text(), f"rank {rank} ended\n{self.log(rank)}"
            time.sleep(0.02)

    def any_says(self, line: str, within: float) -> bool:
        """True if a rank writes that line to its log within so many fair seconds."""
        began = time.time()
        while FAIR.between(began, time.time()) < within:
            if any(line in self.log(rank).splitlines() for rank in range(self.world.size)):
                return True
            time.sleep(0.05)
        return False

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def outcome(self, rank: int) -> dict[str, Any]:
        """Return the outcome that a rank wrote before it ended; AssertionError with its log if it wrote none."""
        path = self.folder / f"{rank}.json"
        assert path.exists(), f"rank {rank} ended with {self.ranks[rank].poll()}\n{self.log(rank)}"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self, ranks: Sequence[int], within: float = END_SECONDS) -> None:
        """Wait until these ranks have ended, for so many fair seconds."""
        began = time.time()
        for rank in ranks:
            while self.ranks[rank].poll() is None:
                assert FAIR.between(began, time.time()) < within, f"rank {rank} does not end\n{self.log(rank)}"
                time.sleep(0.02)

    def close(self) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
                process.send_signal(signal.SIGCONT)
            process.wait()
        self.store.communicate()


@contextlib.contextmanager
def launched(
    world: World,
    folder: Path,
    calls: str,
    *,
    pause: float = 0.0,
    environment: dict[str, str] | None = None,
    limits: Mapping[int, str] = MappingProxyType({}),
    program: str = "victims.py",
) -> Iterator[Job]:
    """Victims as processes; ``limits`` are options of prlimit, by rank; ``program`` is one of this directory."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    common = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    entry = world.entry(world.hosts[0], "store", str(secret), world.address)
    store = fork_server.start(ENTER + STORE, entry, environment=common, stdin=subprocess.PIPE)
    job = Job(world, folder, store)
    try:
        addresses = store.stdout.readline().strip()
        assert addresses, "".join(store.communicate())
        for rank, host in enumerate(world.hosts):
            settings = {
                "MULTIRING_RANK": str(rank),
                "MULTIRING_WORLD_SIZE": str(world.size),
                "MULTIRING_STORE": addresses,
                "MULTIRING_SECRET_FILE": str(secret),
                "MULTIRING_JOB": "faults",
                "MULTIRING_HOST": host,
                "MULTIRING_INIT_TIMEOUT": "120",
                "MULTIRING_TIMEOUT": "60",
                "MULTIRING_HEARTBEAT_TIMEOUT": "5",
                **(environment or {}),
            }
            words = [str(HERE / program), str(folder), calls, str(pause)]
            with (folder / f"{rank}.log").open("w") as log:
                job.ranks.append(_start(world, rank, words, log, {**common, **settings}, limits.get(rank)))
        yield job
    finally:
        job.close()


def _start(
    world: World, rank: int, words: list[str], log: TextIO, environment: dict[str, str], limit: str | None
) -> subprocess.Popen[str] | fork_server.Process:
    if limit:  # what imports need may run out
        command = world.command(world.hosts[rank], "prlimit", limit, sys.executable, *words)
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
    with open(os.devnull) as nothing:
        return fork_server.start_on(
            [nothing.fileno(), log.fileno(), log.fileno()],
            ENTER + FILE,
            world.entry(world.hosts[rank], *words),
            environment=environment,
            imports=(),
            directory=".",
            seat=rank,
        )


@contextlib.contextmanager
def started(world: World, folder: Path, calls: str, **options: Any) -> Iterator[Job]:
    """Victims that are in the middle of their steps."""
    with launched(world, folder, calls, **options) as job:
        for rank in range(world.size):
            job.await_line(rank, "running", START_SECONDS)
        yield job
