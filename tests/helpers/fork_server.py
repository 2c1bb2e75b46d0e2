"""Ranks at the price of a fork: a process that has imported multiring forks one for each request.

A rank that is forked here finds what a fresh interpreter would: the environment, working directory, arguments and
descriptors that it was given and no others, default signals, ``__main__`` as with ``python -c`` or of a file, and an
exit by way of the interpreter's end. multiring, NumPy and what else the test names are imported in it, and nothing of
them was begun.

What an interpreter and what it imports read when they start (AT_START) is the same in all ranks of a server: other
values have a server of their own. So have odd and even ``seats``, or no two ranks had different seeds of hashes.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "NPY_", "LC_", "LANG", "TZ"),
    *("JAX_", "KERAS_", "TF_", "TORCH_", "XLA_"),
)
_OF_RANKS = (
    "numpy.testing",
    "multiring.api",
    "multiring.job.given",
    "multiring.job.growth",
    "multiring.job.rendezvous",
)  # what they import until `multiring.init` has returned
_MOST = 1 << 17  # bytes of a request: less than a socket buffers
_START = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from fork_server import serve
exec(serve())
"""

_servers: dict[tuple[tuple[str, str], ...], _Server] = {}
_all_servers: list[_Server] = []
_starting = threading.Lock()


class Process:
    """A process of a fork server, with what `subprocess.Popen` offers."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                self.returncode = self._server.ask(reap=self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code when it has ended; `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            pause = min(2 * pause, 0.05)
            time.sleep(pause)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Forked(Process):
    """One that writes to pipes, and is told by one: in text."""

    def __init__(self, server: _Server, pid: int, stdout: int, stderr: int, stdin: int | None) -> None:
        super().__init__(server, pid)
        self.stdin = None if stdin is None else open(stdin, "w")  # noqa: SIM115
        self.stdout = _Stream(stdout)
        self.stderr = _Stream(stderr)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it wrote until it ended; after `subprocess.TimeoutExpired` it may be called again."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            self.stdin.close()
        streams = [self.stdout, self.stderr]
        while reading := [stream for stream in streams if not stream.closed]:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready, _, _ = select.select(reading, [], [], left)
            if not ready:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            for stream in ready:
                stream.read_some()
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self.stdout.rest(), self.stderr.rest()


class _Stream:
    """Text that a process writes to a pipe, read line by line or to its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._descriptor

    def read_some(self) -> None:
        piece = os.read(self._descriptor, 1 << 16)
        self._read += piece
        if not piece:
            self.close()

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
            self.closed = True

    def read(self) -> str:
        """All that is left, when it ends."""
        while not self.closed:
            self.read_some()
        return self.rest()

    def readline(self) -> str:
        """The next line with its end; what is left where there is none, and "" after that."""
        while not self.closed and b"\n" not in self._read:
            self.read_some()
        end = self._read.find(b"\n") + 1 or len(self._read)
        line = self._read[:end]
        del self._read[:end]
        return _text(line)

    def rest(self) -> str:
        rest = _text(self._read)
        self._read.clear()
        return rest

    def __del__(self) -> None:
        self.close()


def _text(read: bytearray) -> str:
    return read.decode().replace("\r\n", "\n").replace("\r", "\n")


def read(processes: Sequence[Forked], timeout: float) -> bool:
    """Read some of what several processes write, so that none waits for room in its pipes; whether there was any.

    False comes after ``timeout`` seconds, also where all have closed their pipes.
    """
    open_ones = [stream for each in processes for stream in (each.stdout, each.stderr) if not stream.closed]
    ready, _, _ = select.select(open_ones, [], [], timeout)
    for stream in ready:
        stream.read_some()
    return bool(ready)


def start(
    program: str | Path,
    *words: str,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    seat: int = 0,
    imports: Sequence[str] = (),
    directory: str | Path = ".",
    stdin: int | None = None,
) -> Forked:
    """Run a program as ``python -c`` would, with pipes for what it writes and ``pass_fds`` open under their numbers.

    A path is a file that is run as ``python PATH`` would. ``imports`` are modules that its server is to have imported
    besides. There is nothing to read without ``stdin``, a descriptor or `subprocess.PIPE`.
    """
    pipes = [os.pipe(), os.pipe(), *([os.pipe()] if stdin == subprocess.PIPE else [])]
    (output, writes_output), (error, writes_error), *more = pipes
    given = {1: writes_output, 2: writes_error, **{number: number for number in pass_fds}}
    if stdin is not None:
        given[0] = more[0][0] if more else stdin
    words = (str(program), *words) if isinstance(program, Path) else ("-c", program, *words)
    try:
        server, pid = _fork(words, given, environment, seat, imports, directory)
    finally:
        for theirs in (writes_output, writes_error, *(reads for reads, _ in more)):
            os.close(theirs)
    return Forked(server, pid, output, error, more[0][1] if more else None)


def start_on(
    streams: Sequence[int],
    program: str,
    *words: str,
    environment: Mapping[str, str],
    imports: Sequence[str],
    directory: str | Path,
    seat: int = 0,
) -> Process:
    """Start a program as `start` does, with ``streams`` as its standard streams."""
    given = dict(enumerate(streams))
    return Process(*_fork(("-c", program, *words), given, environment, seat, imports, directory))


def _fork(
    words: Sequence[str],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    seat: int,
    imports: Sequence[str],
    directory: str | Path,
) -> tuple[_Server, int]:
    """A new process that has ``descriptors`` under these numbers, and its server."""
    server = _server(environment, seat, imports)
    pid = server.ask(
        *descriptors.values(),
        words=words,
        environment=dict(environment),
        directory=os.path.abspath(directory),
        numbers=list(descriptors),
    )
    return server, pid


def prepare(*, environment: Mapping[str, str], seats: Sequence[int], imports: Sequence[str]) -> None:
    """Have the servers of these seats do their imports beside each other, and wait for them.

    Ranks of one job that are started next begin together then: none gives up while another waits for an import.
    """
    for server in [_server(environment, seat, imports) for seat in seats]:
        server.ask(ready=True)


def _server(environment: Mapping[str, str], seat: int, imports: Sequence[str]) -> _Server:
    """The one for this seat, which is started where there is none."""
    fixed = {name: value for name, value in environment.items() if name.startswith(AT_START)}
    key = (*sorted(fixed.items()), ("seat", str(seat % 2)), ("imports", " ".join(imports)))
    with _starting:
        server = _servers.get(key)
        if server is None or server.has_ended():
            # Variables of one request would stay in /proc/PID/environ of all that is forked.
            ours = {name: value for name, value in os.environ.items() if not name.startswith(AT_START)}
            server = _servers[key] = _Server({**ours, **fixed}, imports)
            _all_servers.append(server)
    return server


def end(imports: Sequence[str]) -> None:
    """End the servers that have imported just these modules besides, which may hold much memory."""
    for key, server in list(_servers.items()):
        if ("imports", " ".join(imports)) in key:
            server.end()
            del _servers[key]


def seconds() -> float:
    """Processor seconds that all servers took, with those of their processes that have been waited for.

    A server that has ended is not among them: what it took is in the times of this process's children.
    """
    return sum(server.seconds for server in _all_servers if not server.has_ended())


class _Server:
    """This side of a server."""

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str]) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.seconds = 0.0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *imports],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, *descriptors: int, **request: Any) -> Any:
        """Send a request to the server and return its answer; RuntimeError if it has ended."""
        packed = json.dumps(request).encode()
        assert len(packed) < _MOST, f"a request of {len(packed)} bytes: at most {_MOST} can be sent to a fork server"
        with self._lock:
            try:
                socket.send_fds(self._channel, [packed], descriptors)
                answer = self._channel.recv(1000)
            except ConnectionError:
                answer = b""
        if not answer:
            raise RuntimeError(f"the fork server has ended, with exit code {self._process.wait()}: see its output")
        said, self.seconds = json.loads(answer)
        return said

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        if os.getpid() == self._owner:  # and not a process that a test forked from it
            with suppress(OSError):  # the server has ended before
                self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            self._process.wait()


@atexit.register
def _end_all() -> None:
    for server in _all_servers:
        server.end()


def serve() -> CodeType:
    """Fork on request. It returns in what was forked, and gives the program to run there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # typed at a terminal: it is the test that ends what it started
    channel = socket.socket(fileno=int(sys.argv[1]))
    _import(sys.argv[2:])
    running: set[int] = set()
    while True:
        packed, descriptors, _, _ = socket.recv_fds(channel, _MOST, 100)
        if not packed:
            for pid in running:  # a test left them behind
                os.kill(pid, signal.SIGKILL)
            channel.close()
            sys.exit()
        request = json.loads(packed)
        answer: int | None
        if "ready" in request:
            answer = None
        elif "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return _become(request, channel.detach(), descriptors)
            running.add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
        times = os.times()
        channel.send(json.dumps([answer, sum(times[:4])]).encode())


def _import(names: Sequence[str]) -> None:
    for name in (*_OF_RANKS, *names):
        importlib.import_module(name)
    sys.path.remove(os.path.dirname(__file__))
    gc.collect()
    gc.freeze()  # or each collection in a rank, as at its end, writes to the pages of all that is imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"a process of {len(threads)} threads cannot be forked: OMP_NUM_THREADS=1 keeps NumPy's out"
    )


def _become(request: dict[str, Any], channel: int, descriptors: Sequence[int]) -> CodeType:
    """Give this process, just forked, what it was asked to have; its program."""
    os.close(channel)
    hold_only(descriptors, request["numbers"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    return program_of(request["words"])


def hold_only(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Have these descriptors under these numbers, and none else but those of the standard streams."""
    above = max(*descriptors, *numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in moved:
            with suppress(OSError):  # that of the list itself
                os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def program_of(words: Sequence[str]) -> CodeType:
    """Make ``__main__`` ready for ``python WORDS`` (-c TEXT, -m MODULE or a file) and return the code to run there."""
    sys.path_importer_cache.clear()  # a fresh interpreter has seen no directory yet
    if (reports := sys.modules.get("multiring.job.reports")) is not None:
        reports.tell_in_child()
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        return compile(words[1], "<string>", "exec")
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path[0] = os.getcwd()
        return compile(f"import runpy; runpy._run_module_as_main({words[1]!r})", "<string>", "exec")
    sys.argv = list(words)
    path = Path(words[0]).absolute()
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"].__file__ = str(path)
    return compile(path.read_bytes(), path, "exec")
