"""Metrics of a rank for Prometheus: over HTTP, over a unix socket, or from a directory of text files.

`FAMILIES` are the metrics. Names are those of NVIDIA's NCCL Inspector where they mean the same, with a prefix of their
own. The package ``prometheus_client`` writes and serves them; it is imported when a rank is asked for metrics.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from multiring.env import parse_metrics
from multiring.errors import MultiringError, ResourceError
from multiring.planning.plan import IN_BLOCKS
from multiring.runtime.comm import Communicator
from multiring.runtime.world import World

if TYPE_CHECKING:
    from socketserver import TCPServer

    from prometheus_client import CollectorRegistry

Ending = Callable[[], None]

WRITES_EVERY = 10.0
"""Seconds between two writes of a text file; Prometheus asks the collector that reads it every 15 or more."""

SHORTEST_WINDOW = 1.0
"""Seconds over which a rate is taken at least, so that two who ask at the same time are told the same."""

_OF_RANK = ("rank", "host")  # labels of all
_log = logging.getLogger("multiring")


class Family(NamedTuple):
    """A metric: whether it only grows, what it says, and its labels beside those of the rank."""

    counts: bool
    about: str
    labels: tuple[str, ...] = ()


FAMILIES = {
    "multiring_ranks": Family(False, "Ranks in the job now."),
    "multiring_generation": Family(False, "Changes of the job's membership, by shrink or grow."),
    "multiring_failed": Family(False, "1 once the job has failed here, until shrink."),
    "multiring_failure": Family(
        False,
        "1 for that failure: its class, the rank it names, and this rank's call.",
        ("kind", "peer", "call"),
    ),
    "multiring_ranks_lost_total": Family(True, "Ranks without which the job went on, since this one came."),
    "multiring_ranks_replaced_total": Family(True, "Ranks that were admitted, since this one came."),
    "multiring_calls_total": Family(True, "Calls that have completed here.", ("collective",)),
    "multiring_bytes_total": Family(True, "Bytes of their buffers, of all blocks together.", ("collective",)),
    "multiring_call_seconds_total": Family(True, "Seconds from the start of each to its end.", ("collective",)),
    "multiring_collective_exec_time_microseconds": Family(
        False, "Microseconds of a call, the mean since the look before.", ("collective",)
    ),
    "multiring_bus_bandwidth_gbs": Family(
        False, "GB/s (1e9 bytes) on the bus since the look before, as if of all ranks.", ("collective",)
    ),
    "multiring_in_calls_seconds_total": Family(True, "Seconds that callers were in calls, or waited for them."),
    "multiring_waiting_seconds_total": Family(True, "Of these, with nothing to do."),
    "multiring_waited_for_seconds_total": Family(True, "Seconds that callers waited for a rank.", ("peer",)),
    "multiring_link_sent_bytes_total": Family(True, "Bytes sent, by the level of the link.", ("level",)),
    "multiring_link_received_bytes_total": Family(True, "Bytes received, by the level of the link.", ("level",)),
    "multiring_link_busy_seconds_total": Family(True, "Seconds that bytes were on their way.", ("level",)),
    "multiring_link_bandwidth_mbs": Family(
        False, "MB/s (1e6 bytes) of a link while it was busy, since the look before.", ("level",)
    ),
    "multiring_slow_rank_share": Family(
        False, "Share of the time for which all wait for a slow rank.", ("peer", "reason")
    ),
    "multiring_slow_link_part": Family(
        False,
        "Part of what plans count on that a link carries while all wait for it.",
        ("from", "to"),
    ),
}

Rows = list[tuple[tuple[str, ...], float]]
"""Values of the labels of a metric, and its own."""

Samples = dict[str, Rows]


@dataclass
class Rates:
    """The rates between two looks at counters that only grow."""

    began: float
    counted: Mapping[str, Any] = field(default_factory=dict)
    found: Samples = field(default_factory=dict)

    def look(self, counted: Mapping[str, Any], size: int, now: float) -> Samples:
        """Return the counts since the look before; the same again if that was less than `SHORTEST_WINDOW` ago."""
        if now - self.began >= SHORTEST_WINDOW:
            self.found = self._between(self.counted, counted, size)
            self.began, self.counted = now, counted
        return self.found

    def _between(self, before: Mapping[str, Any], after: Mapping[str, Any], size: int) -> Samples:
        times: Rows = []
        buses: Rows = []
        links: Rows = []
        for name, done in after["collectives"].items():
            calls, nbytes, seconds = _grown(before, "collectives", name, done, ("operations", "bytes", "seconds"))
            if calls > 0 and seconds > 0:
                times.append(((name,), 1e6 * seconds / calls))
                buses.append(((name,), _on_bus(name, size) * nbytes / seconds / 1e9))
        for level, link in after["links"].items():
            moved = "bytes_received" if level == "rank" else "bytes_sent"  # shared memory is busy while it is read
            nbytes, seconds = _grown(before, "links", level, link, (moved, "seconds_busy"))
            if nbytes > 0 and seconds > 0:
                links.append(((level,), nbytes / seconds / 1e6))
        return {
            "multiring_collective_exec_time_microseconds": times,
            "multiring_bus_bandwidth_gbs": buses,
            "multiring_link_bandwidth_mbs": links,
        }


def _grown(
    before: Mapping[str, Any], table: str, row: str, now: Mapping[str, float], names: Iterable[str]
) -> list[float]:
    then = before.get(table, {}).get(row, {})
    return [now[name] - then.get(name, 0) for name in names]


def _on_bus(collective: str, size: int) -> float:
    """Bytes that cross the slowest link of a ring, for each byte of all blocks together (NCCL's tests)."""
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if collective in IN_BLOCKS else 1.0


class Exporter:
    """The metrics of one rank, in every generation of its job: `serve` shows them, and `close` ends that."""

    def __init__(self, communicator: Communicator) -> None:
        self._looking = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._end: Ending = lambda: None
        self._lost = self._replaced = 0
        self._begin(communicator)

    def _begin(self, communicator: Communicator) -> None:
        """Ranks are called as at the job's start."""
        world = communicator.world
        self._communicator = communicator
        self._of_rank = (str(world.membership.members[world.rank]), world.topology.hosts[world.rank])
        self._rates = Rates(time.monotonic())

    def follow(self, communicator: Communicator) -> None:
        """Speak of this communicator of all ranks from now on."""
        with self._looking:
            before, now = (set(each.world.membership.members) for each in (self._communicator, communicator))
            self._lost += len(before - now)
            self._replaced += len(now - before)
            self._begin(communicator)

    def samples(self) -> Samples:
        """Return the present samples; engines count anew in each generation."""
        with self._looking:
            communicator = self._communicator
            world, counted = communicator.world, communicator.stats()
            names = world.membership.members
            failure = None if world.left.is_set() else world.engine.failure()
            found: Samples = {
                "multiring_ranks": [((), communicator.size)],
                "multiring_generation": [((), world.membership.generation)],
                "multiring_failed": [((), failure is not None)],
                "multiring_failure": [] if failure is None else [(_told(failure, world), 1)],
                "multiring_ranks_lost_total": [((), self._lost)],
                "multiring_ranks_replaced_total": [((), self._replaced)],
                "multiring_in_calls_seconds_total": [((), counted["seconds_in_calls"])],
                "multiring_waiting_seconds_total": [((), counted["seconds_waiting"])],
                "multiring_waited_for_seconds_total": [
                    ((str(names[peer]),), of["seconds_waited"]) for peer, of in counted["peers"].items()
                ],
            }
            for family, key in (("calls", "operations"), ("bytes", "bytes"), ("call_seconds", "seconds")):
                rows = counted["collectives"].items()
                found[f"multiring_{family}_total"] = [((name,), done[key]) for name, done in rows]
            for family, key in (
                ("sent_bytes", "bytes_sent"),
                ("received_bytes", "bytes_received"),
                ("busy_seconds", "seconds_busy"),
            ):
                rows = counted["links"].items()
                found[f"multiring_link_{family}_total"] = [((level,), link[key]) for level, link in rows]
            slow = counted["slowest"]
            found["multiring_slow_rank_share"] = (
                [((str(names[rank]), slow["reason"]), slow["share"]) for rank in slow["ranks"]] if slow else []
            )
            found["multiring_slow_link_part"] = _slow_link(counted["slow_link"])
            return {**found, **self._rates.look(counted, communicator.size, time.monotonic())}

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, for ``prometheus_client``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        samples = self.samples()
        for name, family in FAMILIES.items():
            kind = CounterMetricFamily if family.counts else GaugeMetricFamily
            made = kind(name, family.about, labels=[*_OF_RANK, *family.labels])
            for labels, value in samples.get(name, []):
                made.add_metric([*self._of_rank, *labels], float(value))
            yield made

    def serve(self, where: str, local_rank: int) -> None:
        """Begin to show them; ResourceError if the place cannot be had."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        kind, place, port = parse_metrics(where)
        what, remedy = f"MULTIRING_METRICS={where}", "name another place, or unset it"
        try:
            if kind == "directory":
                rank = self._of_rank[0]
                what = f"{what}: {place}"
                self._end = _write(registry, Path(place), f"multiring_{rank}.prom")
            elif kind == "unix":
                what = f"{what}: {place}.{local_rank}"
                self._end = _serve_on_unix(registry, Path(f"{place}.{local_rank}"), self._sockets)
            else:
                what = f"{what}: local rank {local_rank} needs port {port + local_rank} of {place}"
                remedy = "name another first port, from which on each rank of a host takes one, or unset it"
                self._end = _serve_on_tcp(registry, place, port + local_rank, self._sockets)
        except OSError as error:
            raise ResourceError(f"{what}: {error.strerror or error}: {remedy}") from None

    def close(self) -> None:
        """Show nothing any more."""
        self._end()

    def leave_in_child(self) -> None:
        """Close the parent's sockets in a forked child."""
        for sock in self._sockets:
            sock.close()


def _slow_link(link: Mapping[str, Any] | None) -> Rows:
    """The part that a slow link carries; a row each way where both are slow."""
    if link is None:
        return []
    ways = [(link["from"], link["to"])] + [(link["to"], link["from"])] * link["both_ways"]
    return [(way, link["bytes_per_second"] / link["expected"]) for way in ways]


def _told(failure: BaseException, world: World) -> tuple[str, str, str]:
    """The labels of a failure: its class, the rank it names, and after a Mismatch the call that this rank made."""
    rank = failure.rank if isinstance(failure, MultiringError) else -1
    disputed = world.disputed()
    call = "" if disputed is None or disputed["call"] is None else "{2} by plan {3}".format(*disputed["call"])
    return type(failure).__name__, str(world.membership.members[rank]) if rank >= 0 else "", call


def check(where: str) -> None:
    """MultiringError unless the package is there by which metrics are shown."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MultiringError(
            f"MULTIRING_METRICS={where} needs prometheus_client, which is not installed: "
            "pip install 'multiring[metrics]', or unset it"
        ) from None


def _serve_on_tcp(registry: CollectorRegistry, address: str, port: int, sockets: list[socket.socket]) -> Ending:
    from prometheus_client import start_http_server

    if port > 65535:
        raise OSError(errno.EADDRNOTAVAIL, "there is no such port")
    server, thread = start_http_server(port, address, registry)
    return _until_ended(server, thread, sockets)


def _serve_on_unix(registry: CollectorRegistry, path: Path, sockets: list[socket.socket]) -> Ending:
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    from prometheus_client import make_wsgi_app

    class Handler(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: standard error is the program's."""

    class UnixServer(ThreadingMixIn, WSGIServer):
        address_family = socket.AF_UNIX
        daemon_threads = True

        def server_bind(self) -> None:
            self.socket.bind(str(path))
            self.server_name, self.server_port = "unix", 0
            self.setup_environ()

        def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
            return self.socket.accept()[0], ("unix", 0)  # the handler asks for an address, and there is none

    if path.is_socket() and not _is_served(path):
        path.unlink()  # a process that was killed left it
    server = UnixServer(("unix", 0), Handler)
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="multiring metrics", daemon=True)
    thread.start()
    end = _until_ended(server, thread, sockets)

    def end_and_remove() -> None:
        end()
        path.unlink(missing_ok=True)

    return end_and_remove


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def _until_ended(server: TCPServer, thread: threading.Thread, sockets: list[socket.socket]) -> Ending:
    sockets.append(server.socket)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def _write(registry: CollectorRegistry, directory: Path, name: str) -> Ending:
    """Write a file now, every `WRITES_EVERY` seconds, and at the end, which removes it."""
    from prometheus_client import write_to_textfile

    path, stopping = str(directory / name), threading.Event()
    lock = _locked(Path(f"{path}.lock"), f"a rank of another job writes {name} there")

    def go_on() -> None:
        has_failed = False
        while not stopping.wait(WRITES_EVERY):
            try:
                write_to_textfile(path, registry)
                has_failed = False
            except OSError as error:
                if not has_failed:
                    _log.warning("metrics are not written (MULTIRING_METRICS): %s: %s", path, error.strerror)
                has_failed = True

    try:
        write_to_textfile(path, registry)
        thread = threading.Thread(target=go_on, name="multiring metrics", daemon=True)
        thread.start()
    except BaseException:
        lock.release()
        raise

    def end() -> None:
        stopping.set()
        thread.join()
        Path(path).unlink(missing_ok=True)
        lock.release()

    return end


@dataclass(frozen=True)
class _Lock:
    """A file that this process alone holds, until `release` or its end; a forked child does not."""

    path: Path
    file: IO[str]

    def release(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.file.close()


def _locked(path: Path, why_not: str) -> _Lock:
    """Hold a file; OSError for ``why_not`` if another process does. Where files cannot be locked, nobody holds any."""
    while True:
        file = path.open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                file.close()
                raise OSError(errno.EBUSY, why_not) from None
        with contextlib.suppress(FileNotFoundError):  # whoever held it has removed it meanwhile
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return _Lock(path, file)
        file.close()
