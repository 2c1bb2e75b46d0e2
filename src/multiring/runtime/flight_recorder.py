"""The flight recorder: the last calls of a rank, in the format that torch's analyser of such records reads.

``python -m torch.distributed.flight_recorder.fr_trace DIRECTORY`` compares the files that the ranks wrote, and names
the rank that has not made a call, or has made another one. The format is torch's, and nothing of torch is needed to
write it. The engine keeps the calls; a thread looks for its failure a few times a second, so that a rank that computes
on, or hangs, leaves a record too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multiring import _native
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, RendezvousError
from multiring.net.membership import Membership
from multiring.runtime.disagreement import Statement, has_most, sides_of
from multiring.runtime.engine import Engine, Remembering
from multiring.whole_files import replace

CALL = np.dtype(_native.RECORDED_CALL)
"""A call as the engine keeps it in memory."""

VERSION = "2.10"
"""The version of the format; the analyser takes files of one version together."""

LOOKS_EVERY = 0.2
"""Seconds between looks for a failure or a signal."""

_AT_START, _LATER = "multiring_", "rank_"
"""Prefixes of records: the analyser also reads what lies below its directory, if the names begin alike."""

_LEFT = r"failure-\d+\.json|culprit-\d+\.pickle|\.(half|failure)-\d+\..*~"
"""Names of what an earlier job may have left beside its records."""

DIFFERS = "differs"
"""Directory below that of the records, with those whose last call is another than most others'."""

_LIBRARY = "gloo"  # the analyser takes the names of libraries that it knows, and no other
_TO_ITSELF = {"send": " 0->0", "recv": " 0<-0"}
_NAMES = {"all_to_all": "all_to_all_single"}  # it compares no sizes of "all_to_all"
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_log = logging.getLogger("multiring")
_directories: dict[str, Path] = {}  # as the job began: the program may change its directory

_STATUS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")

Groups = Mapping[tuple[int, int], Sequence[int]]
"""The members of each group, in its order, by its number and incarnation."""


class Requests:
    """Requests for records by a signal, from the beginning of `init` until the job is left.

    All generations of the job share them: where the signal were nobody's between two of them, it would end the process.
    """

    def __init__(self) -> None:
        self._counter: _native.SignalCounter | None = None
        self._taken = 0
        self.watchers = 0
        """Recorders that look whether there are any."""

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Take the signal of that setting, "" for none, for longer than this context unless the context fails."""
        if name and self._counter is None:
            self._counter = _native.SignalCounter(getattr(signal, f"SIG{name.upper()}"))
            self._taken = self._counter.count
        try:
            yield
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Give the signal back unless somebody still looks, or the program has taken it."""
        if self._counter is not None and not self.watchers:
            self._counter.give_back()
            self._counter = None

    def take(self) -> bool:
        """True if there was one since the last look."""
        before, counter = self._taken, self._counter
        if counter is not None:
            self._taken = counter.count
        return self._taken != before


requests = Requests()
"""Requests that this process gets."""


class FlightRecorder:
    """Writes the record of a rank when its engine fails, or a signal asks for it; `prepare` makes one."""

    def __init__(self, directory: Path, prefix: str, rank: int, about: Mapping[str, Any]) -> None:
        """``about`` is added to what is written."""
        self._directory, self._prefix = directory, prefix
        self._path = directory / f"{prefix}{rank}"
        self._rank = rank
        self._about = about
        self._groups: dict[tuple[int, int], tuple[int, ...]] = {}
        self._engine: Engine | None = None
        self._written_for_failure: bytes | None = None
        """The calls that were written then; none may have been made."""
        self._took_part: bool | None = None
        """True if this rank had made the call that has failed; None if none has."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def know(self, number: int, incarnation: int, members: Sequence[int]) -> None:
        """Tell it of a group: calls have its number alone."""
        self._groups[number, incarnation] = tuple(members)
        if len(self._groups) > 2 * _native.MOST_RECORDED_CALLS:  # groups that were made so long ago have no calls here
            for key in list(self._groups)[1 : _native.MOST_RECORDED_CALLS]:
                del self._groups[key]

    def watch(self, engine: Engine) -> None:
        """Begin to look at the engine."""
        self._engine = engine
        requests.watchers += 1
        self._thread = threading.Thread(target=self._look, name="multiring flight recorder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time; nothing where it was never begun, or in a forked process."""
        if self._thread is None or self._process != os.getpid():
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        requests.watchers -= 1

    def write(self, failure: BaseException | None) -> None:
        """Write the record; one that cannot be written costs a line in the log."""
        if self._engine is None:  # the world did not come about
            return
        recorded = self._engine.recorded()
        said: dict[str, Any] = {}
        if failure is not None:
            self._written_for_failure = recorded
            said["failure"] = _described(failure)
            if isinstance(failure, Mismatch) and isinstance(self._engine, Remembering):
                said["disputed"] = self._engine.disputed()
        calls = np.frombuffer(recorded, CALL)
        failed = FailedCall.told(failure)
        if failed is not None and self._took_part is None:  # what it calls after the failure is refused
            here = (failed.is_here(call, self._rank, self._groups) for call in _rows(calls))
            self._took_part = not failed.is_message and any(here)
        if failed is not None:
            said["took_part"] = self._took_part
        record = {**record_of(calls, self._rank, self._groups, said.get("disputed"), failed), **self._about, **said}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, [pickle.dumps(record)], half=f".half-{self._rank}.{os.getpid()}~")
            if failure is not None:
                replace(self._directory / f"failure-{self._rank}.json", [json.dumps(said).encode()])
                self._settle()
        except OSError as error:
            _log.warning(
                "the flight record of rank %d is lost (MULTIRING_FLIGHT_RECORDER): %s: %s; what failed the job is not "
                "changed by that",
                *(self._rank, error.filename or self._path, error.strerror),
            )
            return
        level = logging.WARNING if self._rank == 0 else logging.INFO
        # The prefix, as the analyser finds none where the program's own files are beside records.
        words = [f"-p {self._prefix}", shlex.quote(str(self._path.parent))]
        command = " ".join(["python -m torch.distributed.flight_recorder.fr_trace", *words])
        _log.log(level, "flight records are in %s; what they say: %s", self._path.parent, command)

    def _settle(self) -> None:
        """Put records where the analyser blames whom the job's own errors blame, as far as these are written.

        It takes the first file that it finds for right, and those below a directory come last. Every rank does so, and
        the last one knows all.
        """
        size = len(self._groups[0, 0])
        told: dict[int, Mapping[str, Any]] = {}
        for rank in range(size):
            with contextlib.suppress(FileNotFoundError):
                told[rank] = json.loads((self._directory / f"failure-{rank}.json").read_bytes())
        for rank in lost_ranks(told, size):
            self._move(rank, self._directory / f"culprit-{rank}.pickle")
        odd = odd_ranks(told, {number: len(members) for (number, _), members in self._groups.items()})
        if odd:
            (self._directory / DIFFERS).mkdir(exist_ok=True)
        for rank in odd:
            self._move(rank, self._directory / DIFFERS / f"{self._prefix}{rank}")

    def _move(self, rank: int, to: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # it has none, or another rank has done it
            os.replace(self._directory / f"{self._prefix}{rank}", to)

    def _look(self) -> None:
        assert self._engine is not None
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(LOOKS_EVERY)
            failure = self._engine.failure()
            is_new = self._written_for_failure is None or (
                stopping and self._engine.recorded() != self._written_for_failure
            )
            if requests.take() or (failure is not None and is_new):
                self.write(failure)


def prepare(path: str, rank: int, host: str, restart: int, membership: Membership, *, goes_on: bool) -> FlightRecorder:
    """Make room for the records of one generation of one restart, before its ranks meet.

    RendezvousError where there is none to be had, and the job does not go on from a generation before.
    """
    generation, members = membership.generation, list(membership.members)
    top = _directories.setdefault(path, Path(path).absolute())
    words = [f"{name}-{n}" for name, n in (("restart", restart), ("generation", generation)) if n]
    directory, prefix = (top / "-".join(words), _LATER) if words else (top, _AT_START)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clear(directory, prefix)
        # As the job begins, its later restarts and generations have none.
        for later in [] if words else filter(_is_of_later_ones, list(directory.iterdir())):
            _clear(later, _LATER)
        _try_to_write(directory / f".half-{rank}.{os.getpid()}~")
    except OSError as error:
        if not goes_on:
            raise RendezvousError(
                f"MULTIRING_FLIGHT_RECORDER={path}: {error.filename or directory}: {error.strerror}: name a directory "
                "that this rank may write to, or unset it"
            ) from None
    about = {"rank": rank, "host": host, "restart": restart, "generation": generation, "members": members}
    return FlightRecorder(directory, prefix, rank, about)


def _try_to_write(path: Path) -> None:
    """OSError that names the directory if no file can be made there: what `os.access` says may not hold."""
    try:
        path.touch()
        path.unlink(missing_ok=True)  # another rank may just clear the directory
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from None


def _clear(directory: Path, prefix: str) -> None:
    """Remove what an earlier job has left there, and nothing of anybody else."""
    old = re.compile(rf"{prefix}\d+|{_LEFT}")
    for path in (*directory.iterdir(), *(directory / DIFFERS).glob("*")):
        if old.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _is_of_later_ones(path: Path) -> bool:
    """True for the directory of a restart or a generation, which another rank does not remove meanwhile."""
    return re.fullmatch(r"(restart|generation)-\d+(-generation-\d+)?", path.name) is not None and path.is_dir()


def lost_ranks(told: Mapping[int, Mapping[str, Any]], size: int) -> list[int]:
    """The ranks that are lost by the word of most of a world of ``size``, from what each wrote of its failure.

    Two where these live and cannot reach each other. A rank for which a call has waited in vain counts as well if it
    had made that call: what it sent has not arrived, and no record shows that. Where all have written and no word has
    most, the one holds that more gave, or else the lowest rank.
    """
    words: dict[tuple[int, ...], list[int]] = {}
    for rank, said in sorted(told.items()):
        failure = said["failure"]
        named = tuple(sorted(each for each in (failure.get("rank", -1), failure.get("apart", -1)) if each >= 0))
        is_late = failure["kind"] == "CollectiveTimeout" and not all(told.get(r, {}).get("took_part") for r in named)
        if named and failure["kind"] != "Mismatch" and not is_late:
            words.setdefault(named, []).append(rank)
    if not words:
        return []
    named, by = min(words.items(), key=lambda word: (-len(word[1]), word[1]))
    return list(named) if 2 * len(by) > size or len(told) == size else []


def odd_ranks(told: Mapping[int, Mapping[str, Any]], sizes: Mapping[int, int]) -> list[int]:
    """The ranks that made another call than most, from what each wrote of its failure; ``sizes`` are those of groups.

    Where all have written and there is no such majority, all that are not on the largest side, or else on that of the
    lowest rank.
    """
    disputed: dict[int, Statement] = {}
    for rank, said in told.items():
        if said.get("disputed"):
            communicator, number, words, plan = said["disputed"]
            disputed[rank] = Statement("", (communicator, number), sizes.get(communicator, 0), words, plan)
    _, sides = sides_of(disputed)
    ranks = [rank for _, side in sides for rank in side]
    if not sides or not (has_most(sides[0][1], disputed) or len(ranks) == disputed[ranks[0]].size):
        return []
    return ranks[len(sides[0][1]) :]


@dataclass(frozen=True)
class FailedCall:
    """A call that some ranks have not made, or made differently."""

    communicator: int
    number: int
    is_message: bool
    ends: frozenset[int]
    """The ranks of a message, as far as they are named."""

    @classmethod
    def told(cls, failure: BaseException | None) -> FailedCall | None:
        """Return it from an error; None if the error is of another kind, or names no call."""
        found = _CALL.search(str(failure)) if isinstance(failure, (CollectiveTimeout, Mismatch)) else None
        if found is None:
            return None
        ends = frozenset(map(int, re.findall(r"rank (\d+)", found["message"])))
        return cls(int(found["communicator"]), int(found["number"]), bool(found["message"]), ends)

    def is_here(self, call: Mapping[str, Any], rank: int, groups: Groups) -> bool:
        """True if this is the ``call`` of a ``rank``."""
        if (self.communicator, self.number, self.is_message) != (
            call["communicator"],
            call["number"],
            _is_message(call),
        ):
            return False
        members = groups.get((call["communicator"], call["incarnation"]), ())
        return not self.is_message or (bool(members) and self.ends <= {rank, members[call["other"]]})


_CALL = re.compile(
    r"\bnumber (?P<number>\d+)(?P<message>( (with tag -?\d+|(to|from) (any rank|rank \d+)))*) of "
    r"communicator (?P<communicator>\d+)"
)
"""A call as errors name it: the first one is that which failed."""


Disagreement = tuple[int, int, str, str]
"""A call on which ranks disagree, as `Remembering.disputed` gives it."""


def record_of(
    calls: np.ndarray[Any, Any],
    rank: int,
    groups: Groups,
    disputed: Disagreement | None = None,
    failed: FailedCall | None = None,
) -> dict[str, Any]:
    """Return the record that torch's analyser reads, from calls of a ``rank`` as the engine gives them (`CALL`).

    Where one call has ``failed``, others that have not ended waited for the same reason. Each rank may be in another
    one, for which the analyser would blame all that are not: so they are calls of a group of this rank alone.

    Collectives belong to their group, and have the number there that messages of errors name. The messages of a tag
    from one rank to another are a group of their own, for the analyser asks all members of a group for each call.
    Receives from any rank are left out until it is known whose message they get.
    """
    config = {_name(*key): _group("default_pg" if key[0] == 0 else f"group {key[0]}", groups[key]) for key in groups}
    entries = []
    status: dict[str, dict[str, int]] = {}
    for call in _aligned(_rows(calls)):
        key = call["communicator"], call["incarnation"]
        if call["number"] == _native.NO_NUMBER or key not in groups:
            continue
        if _is_message(call):
            name, operation, config[name] = _message(call, rank, groups[key])
        else:
            collective = _native.COLLECTIVES[call["collective"]]
            name, operation = _name(*key), _NAMES.get(collective, collective)
        if failed is not None and not call["ended"] and not failed.is_here(call, rank, groups):
            waits = _group(f"calls of rank {rank} that had not ended, of {config[name]['desc']}", [rank])
            name, operation = f"{name} waits", re.sub(r" .*", _TO_ITSELF.get(operation[:4], ""), operation)
            config[name] = waits
        is_disputed = disputed is not None and (key[0], call["number"]) == disputed[:2] and not _is_message(call)
        type_of = f" in {disputed[2]} by plan {disputed[3]}" if disputed is not None and is_disputed else ""
        entries.append(_entry(call, name, config[name]["desc"], operation, len(groups[key]), type_of))
        last = status.setdefault(name, dict.fromkeys(_STATUS, -1))
        for word in _STATUS if call["ended"] else _STATUS[:-1]:
            last[word] = max(last[word], call["number"])
    return {"version": VERSION, "entries": entries, "pg_config": config, "pg_status": status}


def _rows(calls: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return [dict(zip(CALL.names or (), row, strict=True)) for row in calls.tolist()]


def _aligned(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The calls, each with the ``record`` by which the analyser aligns ranks: it leaves out what is older than the
    oldest of any rank.

    That is how many collectives of all ranks came before, the same everywhere. Where none was made it is the place
    among all calls, as torch has it.
    """
    of_all = [call["number"] for call in calls if call["communicator"] == 0 and not _is_message(call)]
    record = of_all[0] if of_all else 0
    for call in calls:
        call["record"] = record if of_all else call["record_index"]
        if call["communicator"] == 0 and not _is_message(call):
            record = call["number"] + 1
    is_cut = len(calls) > 0 and calls[0]["record_index"] > 1  # then others of the first record are overwritten
    oldest = calls[0]["record"] if is_cut and calls[0]["record"] != calls[-1]["record"] else -1
    return (call for call in calls if call["record"] != oldest)


def _is_message(call: Mapping[str, Any]) -> bool:
    return _native.COLLECTIVES[call["collective"]] in ("send", "recv")


def _name(number: int, incarnation: int) -> str:
    return f"{number}.{incarnation}" if incarnation else str(number)


def _group(description: str, members: Sequence[int]) -> dict[str, str]:
    return {"name": description, "desc": description, "ranks": str(list(members))}


def _message(call: Mapping[str, Any], rank: int, members: Sequence[int]) -> tuple[str, str, dict[str, str]]:
    """The name of the group of a message, the operation, and what the group is."""
    direction, peer = _native.COLLECTIVES[call["collective"]], members[call["other"]]
    sender, receiver = (rank, peer) if direction == "send" else (peer, rank)
    pair = sorted((sender, receiver))
    source, target = pair.index(sender), pair.index(receiver)
    tag = call["tag"] - (1 << 64 if call["tag"] >> 63 else 0)
    what = f"messages of tag {tag}" if tag >= 0 else f"{_native.COLLECTIVES[call['part_of']]}: messages"
    name = f"{_name(call['communicator'], call['incarnation'])}/{sender}>{receiver}/{tag}"
    operation = f"send {source}->{target}" if direction == "send" else f"recv {target}<-{source}"
    return name, operation, _group(f"{what} from rank {sender} to rank {receiver}", pair)


def _entry(
    call: Mapping[str, Any], group: str, description: str, operation: str, size: int, type_of: str
) -> dict[str, Any]:
    """``type_of`` is told with the type: there the analyser compares what it has no word for, as the operation."""
    collective, dtype = _native.COLLECTIVES[call["collective"]], _native.DTYPES[call["dtype"]]
    shown = _DTYPES.get(dtype, dtype) + type_of
    count, whole = call["count"], call["count"] * size
    read = whole if collective in ("reduce_scatter", "all_to_all") else count
    written = whole if collective in ("all_gather", "all_to_all") else count
    return {
        "record_id": call["record"],
        "pg_id": call["communicator"],
        "process_group": (group, description),
        "collective_seq_id": call["number"],
        "p2p_seq_id": call["number"] if _is_message(call) else 0,
        "op_id": call["number"],
        "is_p2p": _is_message(call),
        "profiling_name": f"{_LIBRARY}:{operation}",
        "time_created_ns": call["called"],
        "time_discovered_completed_ns": call["ended"] or None,
        "duration_ms": (call["ended"] - call["called"]) / 1e6 if call["ended"] else None,
        "input_sizes": [[read]],
        "output_sizes": [[written]],
        "input_dtypes": [shown],
        "output_dtypes": [shown],
        "state": "started",  # the analyser blames one of the ranks whose states differ
        "retired": call["ended"] != 0,
        "timeout_ms": round(1000 * call["timeout"]),
        "op": _native.OPS[call["op"]],
        "root": call["root"],
        "label": f"{call['label']:06x}" if call["label"] else "",
        "frames": [],
    }


def _described(failure: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": type(failure).__name__, "message": str(failure)}
    if isinstance(failure, MultiringError):
        found |= {name: getattr(failure, name) for name in ("rank", "host", "collective", "number", "seconds")}
        found["apart"] = getattr(failure, "apart", -1)
    return found
