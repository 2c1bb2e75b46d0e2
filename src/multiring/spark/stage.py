"""One function, run as ranks by all tasks of a barrier stage."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import pickle
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyspark import SparkContext, cloudpickle
from pyspark.util import InheritableThread

from multiring import env
from multiring.errors import MultiringError, PeerLost, RendezvousError
from multiring.job.store import Client, Server
from multiring.version import __version__
from multiring.worker import (
    RankAssignment,
    RankFailure,
    Reporter,
    Reports,
    host_label,
    in_a_line,
    reason_of,
    run_rank,
    seen,
    unpickled,
)

POLL_SECONDS = 0.05

GRACE_SECONDS = 5.0
"""Seconds after the first failure in which other ranks may say what they saw. Spark itself gives them 2 s where it ends
them (spark.python.task.killTimeout)."""

SETTLE_SECONDS = 30.0
"""Seconds without another executor after which the slots are counted, where there are as many ranks as slots."""

END_SECONDS = 30.0
"""Seconds that the driver waits for the processes of ranks that Spark was asked to end."""

_log = logging.getLogger("multiring")

_BARRIER_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    start_timeout: float = 600.0,
    **settings: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` as ``num_proc`` ranks, each a task of Spark, and return their results by rank.

    To be called by the driver, while a SparkContext is active. Every rank has joined the job when the function begins,
    so that it calls `multiring.all_reduce` and the others as anywhere else. None for ``num_proc`` takes as many ranks
    as tasks fit in the application at once. ``start_timeout`` is how many seconds all ranks have to start; ``settings``
    are those of `multiring.init`.

    What a rank raises is raised here, with its traceback and with what the other ranks saw as the cause. PeerLost if a
    rank's process or executor was lost, RendezvousError if ranks did not start in time, MultiringError if Spark ended
    the job otherwise. No task is run again. TypeError and ValueError for wrong arguments.
    """
    context = active_context()
    if not callable(function):
        raise TypeError(f"function={function!r}: expected a function, which each rank calls with args and kwargs")
    if not isinstance(args, list | tuple):
        raise TypeError(f"args={args!r}: expected a tuple or a list, the function's arguments")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs={kwargs!r}: expected a dictionary, the function's arguments by name")
    check_settings(start_timeout, settings)
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} and its arguments cannot be pickled for Spark's executors ({reason_of(error)}): open files, "
            "locks, connections and the SparkContext itself belong into the function"
        ) from error
    return run_stage(context, call, number_of_ranks(context, num_proc, start_timeout), start_timeout, settings)


def run_stage(
    context: Any, call: bytes, size: int, start_timeout: float, settings: Mapping[str, Any], rows: Any = None
) -> list[Any]:
    """Run a pickled function with its arguments as `run` does.

    ``rows`` is an RDD of ``size`` partitions, each of which a rank gets as an iterator, its function's first argument.
    """
    with contextlib.closing(_Stage(context, size, settings)) as stage:
        stage.start(call, rows)
        stage.wait(start_timeout)
        return stage.results()


def check_settings(start_timeout: float, settings: Mapping[str, Any]) -> None:
    """ValueError or TypeError for what ranks cannot be started with."""
    if not start_timeout > 0:
        raise ValueError(f"start_timeout={start_timeout!r}: expected seconds, more than 0")
    if "host" in settings:
        raise ValueError(f"host={settings['host']!r}: Spark says on which host a rank is, so leave it out")
    env.read(env.Settings, **settings)


def active_context() -> Any:
    """The driver's SparkContext; MultiringError if there is none, or one that runs no barrier stages."""
    from pyspark.sql.utils import is_remote

    if is_remote():  # a local one has a context here, too
        raise MultiringError(
            "this is a Spark Connect session, which runs no barrier stages: start the driver with a SparkContext "
            "of its own, as spark-submit or SparkSession.builder.master() do"
        )
    context = SparkContext._active_spark_context
    if context is None:
        raise MultiringError(
            "there is no active SparkContext in this process: call multiring.spark in Spark's driver, after "
            "SparkSession.builder.getOrCreate()"
        )
    dynamic = context.getConf().get("spark.dynamicAllocation.enabled", "false")
    if dynamic.lower() == "true":
        raise MultiringError(
            "spark.dynamicAllocation.enabled=true: Spark runs no barrier stage with it; set it to false, and "
            "spark.executor.instances to the number of executors"
        )
    return context


def number_of_ranks(context: Any, num_proc: int | None, timeout: float) -> int:
    """Return the number of ranks; on a cluster it waits for executors that are still to come."""
    most = _most_slots(context)
    if num_proc is None:
        began = changed = time.monotonic()
        known = 0
        while (slots := _slots(context)) < max(1, most or 0):
            now = time.monotonic()
            known, changed = slots, changed if slots == known else now
            if now > began + timeout and not slots:
                raise RendezvousError(f"no executor of this application came in {timeout:g} s, so no rank can start")
            if slots and now > min(began + timeout, changed + SETTLE_SECONDS):
                _log.warning(
                    "%d of at most %d tasks can run in the executors that are there: as many ranks start", slots, most
                )
                break
            time.sleep(POLL_SECONDS)
        return slots
    try:
        wanted = operator.index(num_proc)
    except TypeError:
        raise TypeError(f"num_proc={num_proc!r}: expected a whole number, or None") from None
    if isinstance(num_proc, bool) or wanted < 1:
        raise ValueError(f"num_proc={num_proc!r}: expected 1 rank or more")
    until = time.monotonic() + timeout
    while (slots := _slots(context)) < wanted:
        if (most is not None and wanted > most) or time.monotonic() > until:
            cores = context.getConf().get("spark.task.cpus", "1")
            there = max(slots, most or 0)
            raise ValueError(
                f"num_proc={wanted}, and Spark runs {there} task(s) of this application at once (master "
                f"{context.master}, spark.task.cpus={cores}): ask for no more, or give it more executors or cores"
            )
        time.sleep(POLL_SECONDS)
    return wanted


def _slots(context: Any) -> int:
    """Return the number of tasks that fit at once in the present executors: Spark checks barrier stages with it."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _most_slots(context: Any) -> int | None:
    """The most that it can become when all executors are there, None where the settings do not say."""
    conf = context.getConf()
    each = int(conf.get("spark.task.cpus", "1"))
    if local := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*", context.master):
        return int(local[1]) * (int(local[2]) // each)
    if context.master.startswith("local"):
        return _slots(context)
    executors, cores = conf.get("spark.executor.instances"), conf.get("spark.executor.cores", "1")
    if executors is not None:
        return int(executors) * (int(cores) // each)
    total = conf.get("spark.cores.max")
    return None if total is None else int(total) // each


class _Stage:
    """One barrier stage, and the store in which its ranks meet and tell the driver what becomes of them."""

    def __init__(self, context: Any, size: int, settings: Mapping[str, Any]) -> None:
        self._context = context
        self._size = size
        self._settings = dict(settings)
        self._secret = secrets.token_bytes(32)
        self._tag = f"multiring-{secrets.token_hex(8)}"
        checked = env.read(env.Settings, **settings)
        self._server = Server(self._secret, ports=checked.ports, interface=checked.interface, encrypt=checked.encrypt)
        self._reports = Reports(self._server, size)
        self._thread: threading.Thread | None = None
        self._returned: list[tuple[int, bytes]] | None = None
        self._error: BaseException | None = None
        self._lost: list[int] = []
        self._late: str | None = None

    def start(self, call: bytes, rows: Any) -> None:
        """Hand the stage to Spark, in a thread of its own: this one sees to Ctrl-C and to what ranks say."""
        driver = self._context.getConf().get("spark.driver.host")
        own = [env.join_address(driver.strip("[]"), self._server.port)] if driver else []
        store = tuple(dict.fromkeys([*own, *self._server.addresses]))
        body = _body(call, self._size, store, self._secret, self._settings, rows is not None)
        partitions = self._context.parallelize(range(self._size), self._size) if rows is None else rows
        tasks = partitions.barrier().mapPartitions(body)

        def collect() -> None:
            self._context.addJobTag(self._tag)
            try:
                self._returned = tasks.collect()
            except BaseException as error:  # raised by the thread that waits
                self._error = error
            finally:
                self._context.removeJobTag(self._tag)

        self._thread = InheritableThread(target=collect, name="multiring-spark", daemon=True)
        self._thread.start()

    def wait(self, start_timeout: float) -> None:
        """Return when all ranks have ended, or the job has failed and its ranks had time to say what they saw."""
        assert self._thread is not None
        began, failed_at = time.monotonic(), None
        while self._thread.is_alive() or (self._error is not None and self._reports.unheard()):
            now = time.monotonic()
            self._lost += [rank for rank in self._reports.gone() if rank not in self._lost]
            if self._lost or self._error is not None or self._reports.failures():
                failed_at = now if failed_at is None else failed_at
                if now > failed_at + GRACE_SECONDS:
                    return
            elif now > began + start_timeout and self._reports.missing():
                self._late = self._who_is_missing(start_timeout)
                return
            time.sleep(POLL_SECONDS)

    def results(self) -> list[Any]:
        """Return the function's result of each rank; raises what the function raised, or what ended the job."""
        if self._late is not None:
            raise RendezvousError(self._late)
        failures = self._reports.failures()
        culprits = [failure for failure in failures if not failure.is_consequence]
        words = None if self._error is None else _words_of(self._error)
        if words is not None and (named := _BARRIER_TASK.search(words)):
            rank = int(named[1])
            self._lost = [rank] if self._lost == [] or rank in self._lost else self._lost
        elif words is not None and not failures:
            raise MultiringError(f"Spark ended the job of {self._size} rank(s): {words}") from self._error
        if culprits:
            raise culprits[0].exception() from self._account(culprits[0], failures)
        if self._lost:
            lost = self._lost[0]
            if lost in self._reports.missing():
                raise RendezvousError(f"rank {lost} of {self._size} did not start: {words}", rank=lost)
            why = words or "its process ended, and Spark has not said why"
            raise PeerLost(
                f"{self._named(lost)} of {self._size} was lost: {why}{seen(failures, lost)}",
                rank=lost,
                host=self._reports.place(lost).get("host", ""),
            )
        if failures:
            raise failures[0].exception() from self._account(failures[0], failures)
        assert self._returned is not None
        return [unpickled(rank, result) for rank, result in sorted(self._returned)]

    def close(self) -> None:
        """Have Spark end what still runs, wait for that, and stop serving."""
        try:
            until = time.monotonic() + END_SECONDS
            while time.monotonic() < until and (self._is_running() or self._reports.unheard()):
                if self._is_running():  # each time: Spark knows a job of this tag some time after it was handed over
                    self._context.cancelJobsWithTag(self._tag)
                time.sleep(POLL_SECONDS)
        finally:
            self._server.close()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _named(self, rank: int) -> str:
        place = self._reports.place(rank)
        where = f" (executor {place['executor']}, process {place['process']})" if place else " (which has not started)"
        return f"rank {rank}{where}"

    def _who_is_missing(self, seconds: float) -> str:
        missing = self._reports.missing()
        if len(missing) == self._size:
            return (
                f"none of the {self._size} ranks was started by Spark within {seconds:g} s: other jobs of this "
                "application may hold its executors; wait for them, or raise start_timeout"
            )
        there = ", ".join(self._named(rank) for rank in self._reports.came())
        return (
            f"rank(s) {', '.join(map(str, missing))} of {self._size} did not start within {seconds:g} s, and these "
            f"did: {there}; see the logs of the other executors, or raise start_timeout"
        )

    def _account(self, culprit: RankFailure, failures: Iterable[RankFailure]) -> MultiringError:
        """Return the error of a job: the rank that raised first, what the others saw, and that rank's trace."""
        others = seen(failures, culprit.rank)
        return MultiringError(f"{self._named(culprit.rank)} of {self._size} raised{others}\n{culprit.trace}")


def _words_of(error: BaseException) -> str:
    """Return Spark's message, without the trace of its own code."""
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage())
    kept = [line for line in text.splitlines() if not re.match(r"\s|Traceback |Driver stacktrace|Caused by", line)]
    return in_a_line("\n".join(kept)).removeprefix("Job aborted due to stage failure: ")


def _body(
    call: bytes, size: int, store: tuple[str, ...], secret: bytes, settings: Mapping[str, Any], takes_rows: bool
) -> Callable[[Any], Iterator[tuple[int, bytes]]]:
    """Return the function of each task. It travels by value, so that an executor without multiring can report that."""
    version, python = __version__, platform.python_version()

    def body(rows: Any) -> Iterator[tuple[int, bytes]]:
        import sys

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        rank = context.partitionId()
        executor = context.getTaskInfos()[rank].address
        remedy = "install the driver's version for the Python of all executors"
        try:
            import multiring
        except ImportError as error:
            raise RuntimeError(
                f"rank {rank} (executor {executor}): {sys.executable} cannot import multiring ({error}): {remedy}"
            ) from None
        if multiring.__version__ != version:
            raise RuntimeError(
                f"rank {rank} (executor {executor}): multiring {multiring.__version__} is installed for "
                f"{sys.executable}, and multiring {version} on the driver: {remedy}"
            )
        from multiring.spark.stage import run_task

        first = (rows,) if takes_rows else ()
        yield from run_task(call, first, rank, size, executor, store, secret, settings, python)

    return body


def run_task(
    call: bytes,
    first: tuple[Any, ...],
    rank: int,
    size: int,
    executor: str,
    store: tuple[str, ...],
    secret: bytes,
    settings: Mapping[str, Any],
    python: str,
) -> Iterator[tuple[int, bytes]]:
    """Be a rank in a task of Spark, and tell the driver how it ended."""
    own = env.read(env.Settings, **settings)
    host = host_label(executor.rpartition(":")[0])
    driver = Client(list(map(env.split_address, store)), secret, timeout=own.init_timeout, encrypt=own.encrypt)
    try:
        reporter = Reporter(driver, rank)
        reporter.came({"host": host, "executor": executor, "process": str(os.getpid())})

        def perform() -> Any:
            function, args, kwargs = pickle.loads(call)
            return function(*first, *args, **kwargs)

        given = RankAssignment(rank, size, store, secret, host, settings, python=python)
        outcome = run_rank(given, perform, cloudpickle.dumps)
        reporter.ended(outcome)
        if not isinstance(outcome, RankFailure):
            yield rank, outcome
    finally:
        driver.close()
