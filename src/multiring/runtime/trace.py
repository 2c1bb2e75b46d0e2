"""The timeline of a job: what the engine recorded on each rank, as events that Perfetto and Chrome open.

The file is a JSON array in the Trace Event Format. Every rank is a process in it. Its tracks are its threads (calls
that block, and whom they wait for), the calls of each lane of a communicator, and the segments in flight, row by row:
the phases of each, and in these the waits. Each rank adds its events when it leaves, whatever it leaves for, and the
file is whole after each: a job that fails has a timeline too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from multiring import _native
from multiring.errors import RendezvousError
from multiring.files import read_text

EVENT = np.dtype(_native.TRACE_EVENT)
"""Layout in memory of the events that the engine records."""

CALL, SEGMENT, PHASE, HELD_UP, CALLER, IDLE = map(
    _native.TRACE_EVENTS.index, ("call", "segment", "phase", "held_up", "caller", "idle")
)

PIDS = 100_000
"""The ranks of each generation of each restart have this many process ids, the first ones from 1: 0 is no process."""

_OPEN, _CLOSE = b"[\n", b"\n]\n"
_EMPTY = b"[\n]\n"
_log = logging.getLogger("multiring")
_paths: dict[str, Path] = {}  # as the job began: the program may change its directory
_PROCESS = re.compile(r"rank (\d+) \(host (.*?)\)(?:, |$)")
_lacking: set[Path] = set()  # files where something could not be written: that is said once
_prepared: set[Path] = set()  # files of this process: init after shutdown adds to what it wrote before

Thread = tuple[int, bool, int, bytes]
"""Events of a thread, from the engine: id, True for the progress thread, number of overwritten events, events."""


@dataclass
class Timeline:
    """File of a rank's timeline, and its header; `prepare` makes one."""

    path: Path
    rank: int
    host: str
    restart: int = 0
    generation: int = 0
    offset: int = 0
    """Nanoseconds from this rank's clock to that of the job: rank 0's when all ranks were started."""
    phases: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The names of the phases of each plan, by its number."""
    process: int = field(default_factory=os.getpid)
    _written: bool = False

    def write(
        self,
        threads: Sequence[Thread],
        slow: Sequence[Mapping[str, Any]] = (),
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add what the engine recorded to the file, once; the first time that it cannot be added, that is logged.

        ``slow``: which ranks kept the others waiting, and when, as `Communicator.stats` has it; ``places``: where in
        the program this one was then, by the reason, as far as that is known.
        """
        if self._written or self.process != os.getpid():
            return
        self._written = True
        events = (json.dumps(event, separators=(",", ":")) for event in self.events(threads, slow, places))
        try:
            with _opened(self.path) as descriptor:
                _append(descriptor, ",\n".join(events).encode())
        except RendezvousError as error:
            if self.path not in _lacking:
                _lacking.add(self.path)
                _log.warning("the timeline lacks events of rank %d, and the job goes on without: %s", self.rank, error)

    def events(
        self,
        threads: Sequence[Thread],
        slow: Sequence[Mapping[str, Any]] = (),
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[dict[str, Any]]:
        """The events of this rank, in the Trace Event Format."""
        pid = PIDS * _pair(self.restart, self.generation) + self.rank + 1
        words = [f"rank {self.rank} (host {self.host})"]
        words += [f"{name} {n}" for name, n in (("restart", self.restart), ("generation", self.generation)) if n]
        yield _metadata("process_name", pid, 0, name=", ".join(words))
        place = (self.restart * PIDS + self.generation) * PIDS + self.rank
        yield _metadata("process_sort_index", pid, 0, sort_index=place)
        tracks: dict[tuple[int, ...], int] = {}
        for number, (thread, is_progress, lost, packed) in enumerate(threads):
            name = "progress thread" if is_progress else "main thread" if thread == self.process else f"thread {thread}"
            yield from _track(pid, tracks, (0, number), name + (f" ({lost} earlier events lost)" if lost else ""))
            records = np.frombuffer(packed, EVENT)
            for row in records[np.lexsort((-records["end"], records["begin"]))].tolist():
                event = dict(zip(EVENT.names or (), row, strict=True))
                key, name = _place(event, number)
                yield from _track(pid, tracks, key, name)
                yield {
                    "ph": "X",
                    "pid": pid,
                    "tid": tracks[key],
                    "ts": (event["begin"] + self.offset) / 1e3,
                    "dur": (event["end"] - event["begin"]) / 1e3,
                    **_described(event, self.phases),
                }
        for each in slow:
            if self.rank not in each["ranks"]:
                continue
            key, where = (0, len(threads)), places.get(each["reason"], "")
            yield from _track(pid, tracks, key, "keeps the others waiting")
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tracks[key],
                "ts": 1e6 * each["began"] + self.offset / 1e3,
                "dur": 1e6 * each["seconds"],
                "name": each["reason"],
                "cat": "slow",
                "args": {"share": each["share"], **({"where": where} if where else {})},
            }


def prepare(path: str, rank: int, host: str, restart: int) -> Timeline:
    """Make the file, anew unless this is a restart, which adds to it; RendezvousError if that cannot be."""
    absolute = _paths[path] = Path(path).absolute()
    with _opened(absolute) as descriptor:
        if (not restart and absolute not in _prepared) or not os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, 0)
            _put(descriptor, _EMPTY, 0)
    _prepared.add(absolute)
    return Timeline(absolute, rank, host, restart)


def resume(path: str, rank: int, host: str, restart: int, generation: int) -> Timeline:
    """The timeline of a later generation of a job that goes on, which it does whether or not that can be written."""
    return Timeline(_paths.setdefault(path, Path(path).absolute()), rank, host, restart, generation)


@dataclass(frozen=True)
class SlowSpan:
    """Seconds for which a rank was late, the ``share`` of them for which the others waited, the reason, and ``where``
    it was in its program, "" if unknown."""

    rank: int
    host: str
    reason: str
    seconds: float
    share: float
    where: str


def slow_spans(path: Path) -> list[SlowSpan]:
    """Return the spans of slow ranks in a timeline, in its order.

    OSError if it cannot be read, ValueError with its path if it is no timeline of a job.
    """
    try:
        events = json.loads(read_text(path))
        names = {e["pid"]: _PROCESS.match(e["args"]["name"]) for e in events if e["name"] == "process_name"}
        if not names or None in names.values():
            raise ValueError("none of its processes is a rank")
        found = []
        for event in events:
            match = names.get(event["pid"]) if event.get("cat") == "slow" else None
            if match is not None:
                seconds, told = float(event["dur"]) / 1e6, event["args"]
                share, where = float(told["share"]), str(told.get("where", ""))
                found.append(SlowSpan(int(match[1]), match[2], str(event["name"]), seconds, share, where))
        return found
    except (TypeError, KeyError, AttributeError, RecursionError, ValueError, OverflowError) as error:
        told = f"an event lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: it is no timeline that MULTIRING_TRACE has written: {told}") from None


def _pair(a: int, b: int) -> int:
    """A number for each pair of them, small for small ones (Cantor 1878): a process id has 32 bits."""
    return (a + b) * (a + b + 1) // 2 + b


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of the file, locked; RendezvousError if it is no timeline, or cannot be had, or written."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.pread(descriptor, len(_OPEN), 0) not in (b"", _OPEN):
                raise RendezvousError(
                    f"MULTIRING_TRACE={path} exists and is no timeline: name another file, or remove it"
                )
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RendezvousError(f"MULTIRING_TRACE={path}: {error.strerror}") from None


def _append(descriptor: int, events: bytes) -> None:
    """Put events before the closing bracket, so that the file is whole whoever writes last, even if they do not fit."""
    if not os.fstat(descriptor).st_size:
        _put(descriptor, _EMPTY, 0)
    size = os.fstat(descriptor).st_size
    is_first = size == len(_EMPTY)
    start = len(_OPEN) if is_first else size - len(_CLOSE)
    end = os.pread(descriptor, size - start, start)
    try:
        _put(descriptor, (b"" if is_first else b",\n") + events + _CLOSE, start)
    except OSError:
        _put(descriptor, end, start)
        os.ftruncate(descriptor, size)
        raise


def _put(descriptor: int, content: bytes, position: int) -> None:
    """Write all of it: a full disk takes a part of it before it refuses the rest."""
    while content:
        written = os.pwrite(descriptor, content, position)
        content, position = content[written:], position + written


def _place(event: Mapping[str, int], thread: int) -> tuple[tuple[int, ...], str]:
    """The track of an event, and its name."""
    kind, lane, row = event["kind"], event["lane"], event["row"]
    if kind in (CALLER, IDLE):
        return (0, thread), ""
    internal, number = divmod(event["communicator"], _native.INTERNAL)
    of = f"communicator {number}, lane {lane}" + (" (multiring's own calls)" if internal else "")
    return ((1, lane), of) if kind == CALL else ((1, lane, row), f"{of}, row {row}")


def _track(pid: int, tracks: dict[tuple[int, ...], int], key: tuple[int, ...], name: str) -> Iterator[dict[str, Any]]:
    """Name a track when it is first met; threads come first, then each lane with its rows."""
    if key in tracks:
        return
    tracks[key] = len(tracks) + 1
    position = key[1] if key[0] == 0 else 1000 * (key[1] + 1) + (key[2] + 1 if len(key) > 2 else 0)
    yield _metadata("thread_name", pid, tracks[key], name=name)
    yield _metadata("thread_sort_index", pid, tracks[key], sort_index=position)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _described(event: Mapping[str, int], phases: Mapping[int, tuple[str, ...]]) -> dict[str, Any]:
    kind = event["kind"]
    unfinished = {} if event["finished"] else {"unfinished": True}
    if kind in (HELD_UP, IDLE):
        peer = event["peer"]
        name = "waits" if peer < 0 else f"waits for rank {peer}"
        return {"name": name, "cat": "wait", "args": {"rank": peer, **unfinished}}
    if kind == SEGMENT:
        return {"name": f"segment {event['segment']}", "cat": "segment", "args": unfinished}
    if kind == PHASE:
        known = phases.get(event["plan"], ())
        name = known[event["phase"]] if event["phase"] < len(known) else f"phase {event['phase']}"
        return {"name": name, "cat": "phase", "args": unfinished}
    number = event["number"]
    name = _native.COLLECTIVES[event["collective"]] + ("" if number == _native.NO_NUMBER else f" {number}")
    if kind == CALLER:
        return {"name": name, "cat": "caller", "args": {"communicator": event["communicator"], **unfinished}}
    plan = {"plan": f"{event['plan'] >> 15:012x}"} if event["plan"] in phases else {}
    args = {"bytes": event["bytes"], "dtype": _native.DTYPES[event["dtype"]], **plan, **unfinished}
    return {"name": name, "cat": "call", "args": args}
