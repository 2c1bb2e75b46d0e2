"""Ranks as processes of one host, joined by bare socket pairs: engines without rendezvous.

``run(n, program)`` starts n processes that each call ``program(rank)``, a function of ``engine_programs``; what it
returns comes back as JSON. A process that dies of a signal gives ``None``. With ``tcp`` the ranks share no memory,
as if each had a host of its own. ``fresh`` ranks have an interpreter of their own, as in ``jobs``.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import fork_server

HERE = Path(__file__).parent
PATHS = [HERE, HERE.parent / "unit", HERE.parent / "helpers", HERE.parents[1] / "src"]
CALL = "import engine_ranks; engine_ranks.main()"

Process = subprocess.Popen[str] | fork_server.Forked


@contextmanager
def started(
    n: int, program: str, *arguments: Any, tcp: bool = False, fresh: bool = False
) -> Iterator[Sequence[Process]]:
    """Processes of n ranks that run a program of ``engine_programs``."""
    with ExitStack() as stack:
        ends: list[dict[int, list[socket.socket]]] = [{} for _ in range(n)]  # [control, data ...] by rank and peer
        for a, b in combinations(range(n), 2):
            pairs = [socket.socketpair(), *([tcp_pair()] if tcp else [])]
            ends[a][b], ends[b][a] = ([stack.enter_context(s) for s in side] for side in zip(*pairs, strict=True))
        path = os.pathsep.join(filter(None, [*map(str, PATHS), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        processes: list[Process] = []
        for rank in range(n):
            fds = {peer: [end.fileno() for end in mine] for peer, mine in ends[rank].items()}
            words = [program, str(rank), str(n), json.dumps(fds), json.dumps(arguments)]
            passed = [fd for mine in fds.values() for fd in mine]
            if fresh:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", CALL, *words],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        pass_fds=passed,
                    )
                )
            else:
                processes.append(fork_server.start(CALL, *words, environment=environment, pass_fds=passed, seat=rank))
        for end in (end for mine in ends for pair in mine.values() for end in pair):
            end.close()
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()


def results(processes: Sequence[Process], timeout: float = 60.0) -> list[Any]:
    """Return the value of each rank's program."""
    values = []
    for process in processes:
        out, error = process.communicate(timeout=timeout)
        if process.returncode > 0:
            raise RuntimeError(f"a rank ended with {process.returncode}: {out}\n{error}")
        values.append(json.loads(out) if process.returncode == 0 else None)
    return values


def run(n: int, program: str, *arguments: Any, tcp: bool = False, fresh: bool = False) -> list[Any]:
    """Run a program of ``engine_programs`` as n ranks to its end."""
    with started(n, program, *arguments, tcp=tcp, fresh=fresh) as processes:
        return results(processes)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def connect(engine: Any, fds: dict[str, list[int]]) -> None:
    """Attach the peers: over TCP where there is a connection, else by exchanging memory and doorbell."""
    for peer, (control, *data) in fds.items():
        if data:
            engine.attach_tcp(int(peer), data)
            engine.attach_control(int(peer), control)
    links = {int(peer): socket.socket(fileno=control) for peer, (control, *data) in fds.items() if not data}
    own = array.array("i", [engine.memory_fd, engine.doorbell_fd])
    for link in links.values():
        link.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, own)])
    for peer, link in links.items():
        _, received, _, _ = socket.recv_fds(link, 1, 2)
        engine.attach_local(peer, *received, link.detach())


def main() -> None:
    import engine_programs
    from engines import Rank
    from workers import named

    from multiring import _native as native

    program, rank, n, fds, arguments = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(json.loads, sys.argv[4:6])
    engine = native.Engine(rank, n, hosts=["here"] * n)
    connect(engine, fds)
    engine.communicator(0, list(range(n)))
    print(json.dumps(named(program, engine_programs.__name__)(Rank(engine, rank), n, *arguments)))
    engine.shutdown()
