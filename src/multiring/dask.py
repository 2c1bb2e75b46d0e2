"""Ranks in the workers of Dask: one function, run by one task on each worker."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import operator
import os
import pickle
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import IO, Any

import cloudpickle
from distributed import Client

from multiring import api, env
from multiring.errors import MultiringError, PeerLost, RendezvousError
from multiring.job import store
from multiring.version import __version__
from multiring.worker import (
    RankAssignment,
    RankFailure,
    Reporter,
    Reports,
    host_label,
    reason_of,
    run_rank,
    seen,
    unpickled,
)

POLL_SECONDS = 0.05

MEMBERS_SECONDS = 2.0
"""Between two looks which workers the scheduler has: a rank's own connection tells sooner, once it has one."""

SCHEDULER_SECONDS = 30.0
"""Seconds that the scheduler has to list the workers."""

GRACE_SECONDS = 5.0
"""Seconds after the first failure in which the other ranks may report what they saw."""

END_SECONDS = 15.0
"""Seconds that the driver waits for ranks that were told to end."""

AGAIN_SECONDS = 1.0
"""Between two attempts to end a function, which may catch what ends it."""

REACH_SECONDS = 30.0
"""Seconds that a rank tries to reach its driver, which was there before the rank was sent off."""

TASK = "__import__('importlib').import_module('multiring.dask').be_rank(packed)"
"""The task of a worker, as text: a worker without multiring ends where it cannot unpickle a function."""

__all__ = ["run"]

_log = logging.getLogger("multiring")

_occupied = threading.Lock()
_occupant: tuple[RankAssignment, str] | None = None  # the rank that this process is, and its worker


def run(
    client: Client,
    function: Callable[..., Any],
    /,
    *args: Any,
    workers: int | Sequence[str] | None = None,
    start_timeout: float = 600.0,
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` as one rank on each worker of Dask, and return their results by rank.

    Every rank has joined the job when the function begins, so that it calls `multiring.all_reduce` and the others as
    anywhere else. ``workers`` are how many workers become ranks, or their addresses in the order of the ranks; None
    takes all. ``start_timeout`` is how many seconds all ranks have to start; ``settings`` are those of
    `multiring.init`.

    What a rank raises is raised here, with its traceback and with what the other ranks saw as the cause. PeerLost if a
    rank's process was lost, RendezvousError if ranks did not start, MultiringError if Dask ended them otherwise or
    ``client`` is closed. No rank is run again, here or on another worker. TypeError and ValueError for wrong arguments.
    """
    _check_client(client)
    if not callable(function):
        raise TypeError(f"function={function!r}: expected a function, which each rank calls with the arguments")
    if not start_timeout > 0:
        raise ValueError(f"start_timeout={start_timeout!r}: expected seconds, more than 0")
    if not isinstance(settings, Mapping | None):
        raise TypeError(f"settings={settings!r}: expected a dictionary, such as {{'timeout': 60}}")
    given = dict(settings or {})
    if "host" in given:
        raise ValueError(f"host={given['host']!r}: Dask says on which host a worker is, so leave it out")
    checked = env.read(env.Settings, **given)
    try:
        call = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # it is the user's code that says how
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} and its arguments cannot be pickled for Dask's workers ({reason_of(error)}): open files, locks, "
            "connections and the client itself belong into the function"
        ) from error
    with _Job(client, _chosen(client, workers), given, checked) as job:
        job.start(call)
        job.wait(start_timeout)
        return job.results()


def _check_client(client: Any) -> None:
    if not isinstance(client, Client):
        raise TypeError(f"client={client!r}: expected a distributed.Client")
    if client.asynchronous:
        raise ValueError(
            f"client={client!r} is asynchronous, and run() waits for its ranks: make a Client(asynchronous=False), and "
            "call run() from a thread where an event loop runs in this one"
        )
    if client.status != "running":
        raise MultiringError(f"client={client!r} is {client.status}: make a new Client of the cluster")


def _members(client: Client) -> dict[str, dict[str, Any]]:
    """The workers that the scheduler has, by address."""
    found = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=SCHEDULER_SECONDS)
    return dict(found["workers"])


def _chosen(client: Client, workers: Any) -> dict[str, str]:
    """The host of each worker that becomes a rank, by address and in the order of the ranks."""
    is_number = hasattr(workers, "__index__")
    if isinstance(workers, bool) or (is_number and operator.index(workers) < 1):
        raise ValueError(f"workers={workers!r}: expected 1 worker or more, or their addresses")
    is_list = isinstance(workers, (list, tuple)) and all(isinstance(each, str) for each in workers)
    if not (workers is None or is_number or is_list):
        raise TypeError(f"workers={workers!r}: expected how many workers, or a list of their addresses")
    members = _members(client)
    there = sorted(members, key=lambda address: (str(members[address]["host"]), *_natural(address)))
    if is_list:
        asked = list(workers)
        if not asked or len(set(asked)) < len(asked):
            raise ValueError(f"workers={asked!r}: expected one address or more, and each once")
        if unknown := [each for each in asked if each not in members]:
            raise ValueError(
                f"workers={asked!r}: the cluster has no worker {', '.join(unknown)}; its {len(there)} workers are "
                f"{', '.join(there) or 'none'}"
            )
    else:
        wanted = max(1, len(there)) if workers is None else operator.index(workers)
        if wanted > len(there):
            fewer = f", or give workers={len(there)}" if there else ""
            raise ValueError(
                f"{wanted} rank(s) need as many workers, and the cluster has {len(there)}: "
                f"client.wait_for_workers({wanted}) waits for more{fewer}"
            )
        asked = there[:wanted]
    if len(asked) > 1 and (inside := [each for each in asked if each.startswith("inproc://")]):
        raise ValueError(
            f"workers {', '.join(inside)} are threads of one process, and each rank needs a process of its own: start "
            "LocalCluster(processes=True)"
        )
    return {address: str(members[address]["host"]) for address in asked}


def _natural(text: str) -> list[Any]:
    """The text in pieces that sort numbers by their values."""
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", text)]


class _Job:
    """The tasks that are ranks, the store in which they meet, and the one in which they tell what becomes of them."""

    def __init__(
        self, client: Client, workers: Mapping[str, str], settings: Mapping[str, Any], checked: env.Settings
    ) -> None:
        self._client = client
        self._workers = list(workers)
        self._hosts = list(workers.values())
        self._settings = dict(settings)
        self._secret = secrets.token_bytes(32)
        self._futures: list[Any] = []
        self._thread: threading.Thread | None = None
        self._returned: list[bytes | None] | None = None
        self._error: BaseException | None = None
        self._left: list[int] = []
        self._looked = time.monotonic()
        with contextlib.ExitStack() as opened:
            serve = partial(
                store.Server,
                self._secret,
                ports=checked.ports,
                interface=checked.interface,
                encrypt=checked.encrypt,
            )
            self._meeting = serve()
            opened.callback(self._meeting.close)
            self._server = serve()
            opened.callback(self._server.close)
            self._reports = Reports(self._server, len(workers))
            own = [("127.0.0.1", self._server.port)]
            self._own = store.Client(own, self._secret, timeout=REACH_SECONDS, encrypt=checked.encrypt)
            self._opened = opened.pop_all()

    def __enter__(self) -> _Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened, contextlib.closing(self._own):
            if self._futures:
                self._end(error)

    def start(self, call: bytes) -> None:
        """Hand the ranks to Dask, and have a thread wait for what they return: this one sees to Ctrl-C."""
        size, job = len(self._workers), secrets.token_hex(8)
        for rank, (address, host) in enumerate(zip(self._workers, self._hosts, strict=True)):
            given = RankAssignment(rank, size, self._meeting.addresses, self._secret, host, self._settings)
            packed = pickle.dumps((given, self._server.addresses, address, call))
            self._futures.append(
                self._client.submit(
                    eval,
                    TASK,
                    {"packed": io.BytesIO(packed)},  # its repr, which is logged, does not show the secret
                    key=f"multiring-{job}-{rank}",
                    workers=[address],
                    allow_other_workers=False,
                    retries=0,
                    pure=False,
                )
            )

        def gather() -> None:
            try:
                self._returned = self._client.gather(self._futures)
            except BaseException as error:  # raised by the thread that waits
                self._error = error

        self._thread = threading.Thread(target=gather, name="multiring-dask", daemon=True)
        self._thread.start()

    def wait(self, start_timeout: float) -> None:
        """Return when all ranks have ended, or the job has failed and its ranks had time to say what they saw."""
        assert self._thread is not None
        began, failed_at, met = time.monotonic(), None, False
        while self._thread.is_alive() or (self._error is not None and self._reports.unheard()):
            now = time.monotonic()
            self._look(now)
            if self._reports.gone() or self._left or self._error is not None or self._reports.failures():
                failed_at = now if failed_at is None else failed_at
                is_closed = self._client.status in ("closing", "closed")  # the user wants no more of it
                if not met or is_closed or now > failed_at + GRACE_SECONDS or not self._reports.unheard():
                    return
            elif not met and not self._reports.missing():
                self._own.set("dask/go", b"1")
                met = True
            elif not met and now > began + start_timeout:
                raise RendezvousError(self._who_is_missing(start_timeout))
            time.sleep(POLL_SECONDS)

    def results(self) -> list[Any]:
        """Return the function's result of each rank; raises what the function raised, or what ended the job."""
        failures = self._reports.failures()
        size = len(self._workers)
        if lost := self._reports.gone() or self._left:
            began = lost[0] in self._reports.came()
            why = "its process has ended or cannot be reached" if began else "it left the cluster before it began"
            if began and lost[0] in self._reports.ended():
                why = "its worker left the cluster before its result was here"
            raise (PeerLost if began else RendezvousError)(
                f"{self._named(lost[0])} of {size} was lost: {why}{seen(failures, lost[0])}",
                rank=lost[0],
                host=self._hosts[lost[0]],
            )
        culprits = [failure for failure in failures if not failure.is_consequence] or failures
        if culprits:
            account = f"{self._named(culprits[0].rank)} of {size} raised{seen(failures, culprits[0].rank)}"
            raise culprits[0].exception() from MultiringError(f"{account}\n{culprits[0].trace}")
        if self._error is not None:
            raise self._by_dask(self._error) from self._error
        returned = [result for result in self._returned or () if result is not None]
        assert len(returned) == size
        return [unpickled(rank, result) for rank, result in enumerate(returned)]

    def _end(self, error: BaseException | None) -> None:
        """Have the ranks that still run end, wait for that, and have Dask forget the tasks."""
        if error is not None:
            self._own.settle("dask/go", b"")
            for rank in range(len(self._workers)):
                self._own.settle(f"dask/end/{rank}", reason_of(error).encode())
        self._meeting.close()
        until = time.monotonic() + END_SECONDS
        while (still := self._running()) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if still:
            left = [self._workers[rank] for rank in sorted(still)]
            _log.warning(
                "%s did not end within %g s of being told to: what it calls cannot be interrupted, or it is stopped; "
                "client.restart_workers(%r) ends it",
                ", ".join(map(self._named, sorted(still))),
                END_SECONDS,
                left,
            )
        if self._client.status == "running":
            try:
                self._client.cancel(self._futures)
            except (OSError, TimeoutError) as error:
                _log.warning("Dask could not be told to forget the ranks: %s", reason_of(error))
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _look(self, now: float) -> None:
        """Note the workers that have left the cluster, and of whose ranks nothing else would tell."""
        assert self._thread is not None
        silent = [rank for rank in range(len(self._workers)) if rank not in self._reports.unheard()]
        if now < self._looked + MEMBERS_SECONDS or not silent or not self._thread.is_alive():
            return
        try:
            members = _members(self._client)
        except (OSError, TimeoutError) as error:
            raise MultiringError(
                f"Dask's scheduler ({self._client!r}) does not answer: {reason_of(error)}: is it running?"
            ) from error
        self._left = [
            rank
            for rank in silent
            if self._workers[rank] not in members and self._futures[rank].status not in ("finished", "error")
        ]
        self._looked = time.monotonic()

    def _running(self) -> set[int]:
        """Ranks whose tasks have begun and are not over: their workers cannot be ranks of another job yet."""
        states = {rank: future.status for rank, future in enumerate(self._futures)}
        over = {rank for rank, status in states.items() if status in ("finished", "error")}
        # Dask tells no more of a task that it has cancelled, as those of a closed client, and does not end it.
        over |= {rank for rank in self._reports.ended() if states[rank] == "cancelled"}
        return set(self._reports.came()) - over - set(self._reports.gone()) - set(self._left)

    def _named(self, rank: int) -> str:
        place = self._reports.place(rank)
        process = f", process {place['process']}" if place else ""
        return f"rank {rank} (worker {self._workers[rank]}{process})"

    def _who_is_missing(self, seconds: float) -> str:
        missing = self._reports.missing()
        busy = self._client.processing([self._workers[rank] for rank in missing])

        def state(rank: int) -> str:
            others = len(busy.get(self._workers[rank], ())) - 1
            return f"has {others} other task(s)" if others > 0 else "has no other task, and may be stopped"

        named = ", ".join(f"{self._named(rank)}, which {state(rank)}" for rank in missing)
        return (
            f"{len(missing)} of {len(self._workers)} ranks did not start within {seconds:g} s: {named}; wait until the "
            "workers are free, name others, or raise start_timeout"
        )

    def _by_dask(self, error: BaseException) -> MultiringError:
        """Return what ended a rank before it could tell the driver itself; or what ended all of them."""
        size = len(self._workers)
        for rank, future in enumerate(self._futures):
            if future.status == "error":
                remedy = ""
                if isinstance(error, (ImportError, AttributeError)):
                    remedy = f": install multiring {__version__}, the driver's, for the Python of all workers"
                return RendezvousError(
                    f"{self._named(rank)} of {size} could not start: {reason_of(error)}{remedy}",
                    rank=rank,
                    host=self._hosts[rank],
                )
        states = ", ".join(f"rank {rank} is {future.status}" for rank, future in enumerate(self._futures))
        return MultiringError(
            f"Dask ended the {size} ranks ({states}): {reason_of(error)}; was the client closed, the scheduler stopped "
            "or the cluster restarted?"
        )


def be_rank(packed: IO[bytes]) -> bytes | None:
    """Be a rank in a task of Dask, as the driver has packed it, and tell the driver how it ended."""
    given, driver, address, call = pickle.load(packed)
    given.check()
    addresses = [env.split_address(each) for each in driver]
    with (
        _process_of_its_own(given, address),
        contextlib.closing(_reach(addresses, given)) as told,
    ):
        mine = secrets.token_bytes(8)
        if told.settle(f"dask/task/{given.rank}", mine) != mine:
            raise MultiringError(
                f"rank {given.rank} was begun before, by a worker that was lost: a rank is not run again",
                rank=given.rank,
            )
        reporter = Reporter(told, given.rank)
        reporter.came({"process": str(os.getpid())})
        if not _said_at(told, "dask/go"):
            return None
        with _Leash(given, addresses, told) as leash:
            outcome = run_rank(replace(given, host=host_label(given.host)), leash.around(call), cloudpickle.dumps)
        reporter.ended(outcome)
        return None if isinstance(outcome, RankFailure) else outcome


@contextlib.contextmanager
def _process_of_its_own(given: RankAssignment, address: str) -> Iterator[None]:
    """MultiringError where the process of this worker is another rank."""
    global _occupant
    with _occupied:
        if _occupant is not None:
            other, where = _occupant
            if other.secret == given.secret:
                raise MultiringError(
                    f"worker {address} (rank {given.rank}) is in one process with worker {where} (rank {other.rank}), "
                    "and each rank needs a process of its own: start LocalCluster(processes=True), or name one of them",
                    rank=given.rank,
                )
            raise MultiringError(
                f"worker {address} is rank {other.rank} of another job at present: wait for that run() to return, "
                f"name other workers, or end it by client.restart_workers([{where!r}])",
                rank=given.rank,
            )
        _occupant = given, address
    try:
        yield
    finally:
        with _occupied:
            _occupant = None


def _said_at(client: store.Client, key: str) -> bytes:
    """Wait for the value of a key, without limit, and return it; RendezvousError when the driver is gone."""
    while True:
        try:
            return client.get(key, 3600)
        except TimeoutError:
            continue


class _Ended(BaseException):
    """Raised in the function of a rank whose driver has given the job up."""

    def __str__(self) -> str:
        return "the driver has given the job up, or is gone"


def _reach(driver: Sequence[tuple[str, int]], given: RankAssignment) -> store.Client:
    encrypt = env.read(env.Settings, **given.settings).encrypt
    return store.Client(driver, given.secret, timeout=REACH_SECONDS, encrypt=encrypt)


class _Leash:
    """Ends a rank's function when the driver gives the job up, or is gone: a task of Dask is a thread, and runs on."""

    def __init__(self, given: RankAssignment, driver: Sequence[tuple[str, int]], told: store.Client) -> None:
        self._rank = given.rank
        self._told = told
        self._client = _reach(driver, given)
        self._inside = threading.Lock()
        self._running: int | None = None  # the thread that is in the function
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="multiring-dask-leash", daemon=True)

    def __enter__(self) -> _Leash:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        try:
            self._told.settle(f"dask/end/{self._rank}", b"")
        finally:
            self._thread.join()
            self._client.close()

    def around(self, call: bytes) -> Callable[[], Any]:
        """A function that runs ``call`` and can be interrupted."""

        def perform() -> Any:
            function, args, kwargs = pickle.loads(call)
            self._running = threading.get_ident()
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return perform

    def _leave(self) -> None:
        """Make sure that nothing is raised any more in this thread, which goes on to other tasks."""
        while self._running is not None:
            try:
                with self._inside:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)
                    self._running = None
            except _Ended:
                continue

    def _watch(self) -> None:
        try:
            reason = _said_at(self._client, f"dask/end/{self._rank}").decode()
        except (RendezvousError, OSError) as error:
            reason = reason_of(error)
        if self._over.is_set():
            return
        _log.warning("rank %d is ended, as its driver has given the job up or is gone: %s", self._rank, reason)
        while not self._over.is_set():
            with self._inside:
                if self._running is not None:
                    self._fail(reason)
            self._over.wait(AGAIN_SECONDS)
            with self._inside:
                if self._running is not None:
                    raised = ctypes.py_object(_Ended)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._running), raised)

    def _fail(self, reason: str) -> None:
        """End a collective that the function waits for."""
        if api.is_initialized() and api.world_size() > 1:
            engine = api.joined(None).world.engine
            engine.fail("PeerLost", self._rank, f"rank {self._rank} was ended by its driver: {reason}")
