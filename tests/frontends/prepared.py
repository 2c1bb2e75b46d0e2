"""Ranks at the price of a fork, for frameworks that take a process some seconds to import.

Two processes import what a program needs, one for even and one for odd ranks, so that these differ in the seeds of
their hashes. Nothing of multiring or the framework is begun in them, and each has one thread. A rank that is forked
there gets the variables that ``multiring run`` sets, streams of its own, and runs the program as ``__main__``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent
SECRET = b"the secret of a test's job"
PATIENCE = 60.0
"""Seconds after the end of a rank that failed, after which the others are killed."""

_START = "import prepared; exec(prepared.serve())"


class Prepared:
    """Processes that have imported ``modules`` with some environment, and start jobs; `close` ends them."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        path = os.pathsep.join(filter(None, [str(HERE), given.get("PYTHONPATH", "")]))
        self._environment = {**given, "PYTHONPATH": path}
        words = [sys.executable, "-c", _START, *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._servers = [subprocess.Popen(words, env=self._environment, text=True, **pipes) for _ in range(2)]

    def job(self, program: Path, *arguments: str, ranks: int, timeout: float) -> subprocess.CompletedProcess[str]:
        """How a job of this program ended; after ``timeout`` seconds its ranks are killed."""
        from multiring.job.store import Server

        store = Server(SECRET, job="test", bind=["127.0.0.1"])
        words = [str(program), *arguments]
        with tempfile.TemporaryDirectory() as folder:
            secret = Path(folder, "secret")
            secret.touch(mode=0o600)
            secret.write_bytes(SECRET)
            pids = []
            for rank in range(ranks):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                job = {
                    **{prefix + name: str(value) for name, value in place.items() for prefix in ("", "MULTIRING_")},
                    "MULTIRING_STORE": ",".join(store.addresses),
                    "MULTIRING_SECRET_FILE": str(secret),
                    "MULTIRING_JOB": "test",
                }
                request = {"words": words, "environment": {**self._environment, **job}, "streams": f"{folder}/{rank}"}
                pids.append(self._ask(rank, **request))
            try:
                codes = self._ended(pids, timeout)
            finally:
                store.close()
            output, error = (
                "".join(Path(folder, f"{rank}.{stream}").read_text(errors="replace") for rank in range(ranks))
                for stream in ("out", "err")
            )
        failed = [code for code in codes if code]
        return subprocess.CompletedProcess(words, failed[0] if failed else 0, output, f"exit codes {codes}\n{error}")

    def close(self) -> None:
        for server in self._servers:
            server.communicate()

    def _ended(self, pids: Sequence[int], timeout: float) -> list[int]:
        codes: list[int | None] = [None] * len(pids)
        deadline = time.monotonic() + timeout
        while None in codes:
            late = time.monotonic() > deadline
            for rank, pid in enumerate(pids):
                if codes[rank] is None:
                    codes[rank] = self._ask(rank, reap=pid, kill=late)
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + PATIENCE)
            time.sleep(0.05)
        return [code for code in codes if code is not None]

    def _ask(self, rank: int, **request: Any) -> Any:
        server = self._servers[rank % 2]
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        except BrokenPipeError:
            answer = ""
        assert answer, f"the process that forks ranks has ended, with exit code {server.wait()}: see its output"
        return json.loads(answer)


def serve() -> CodeType:
    """Fork on request; it returns in what was forked, and gives the program to run there."""
    for module in sys.argv[1:]:
        __import__(module)
    gc.collect()
    gc.freeze()  # or each collection in a rank would copy the pages of all that is imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process of {len(threads)} threads cannot be forked"
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            if request["kill"]:
                os.kill(request["reap"], signal.SIGKILL)
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return _become(request)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:  # the test was ended
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def _become(request: dict[str, Any]) -> CodeType:
    """Give this process, just forked, what it was asked to have; its program."""
    flags = os.O_WRONLY | os.O_CREAT
    streams = [
        os.open(os.devnull, os.O_RDONLY),
        *(os.open(request["streams"] + end, flags, 0o600) for end in (".out", ".err")),
    ]
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["words"]
    return compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec")
