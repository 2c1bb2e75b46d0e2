"""The functions of ``import multiring``: the default communicator's methods, or those of ``group``."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from multiring import _native, env
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost
from multiring.files import write_text
from multiring.planning.choice import Choice
from multiring.runtime import clocks, flight_recorder
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.group import Group
from multiring.runtime.work import time_limit
from multiring.runtime.world import World
from multiring.training import sharding, weights

if TYPE_CHECKING:  # what only a job needs
    from multiring import metrics
    from multiring.job.given import GivenIdentity
    from multiring.job.status import StatusTeller
    from multiring.job.survivors import Agreement

_T = TypeVar("_T", bound=Callable[..., Any])
_M = TypeVar("_M", float, Mapping[str, float])

_log = logging.getLogger("multiring")

_default: Communicator | None = None
_given: GivenIdentity | None = None  # what `init` was given for it
_exporter: metrics.Exporter | None = None  # shows its metrics, if that is asked for
_teller: StatusTeller | None = None  # tells its status, where a launcher started it
_has_reported = False  # its failure to the launcher
_reporting = threading.RLock()  # a signal's handler may be told of an error where this thread reports one
_inherited: Communicator | None = (
    None  # the parent's, in a forked process: kept, so that nothing of it is released here
)
_marks: list[str | None] = []  # the values of env.RANKS in the parent
_lock = threading.Lock()
_dispatched: list[Callable[[], object]] = []


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: str | Sequence[str] | None = None,
    secret: bytes | str | None = None,
    job: str | None = None,
    **options: Any,
) -> Communicator:
    """Join the job that the launcher's environment describes; without any, be a world of one.

    Where no launcher started the ranks, ``rank`` and ``world_size`` say which of them this process is, and they meet at
    ``store`` ("host:port", or a list of them) with the ``secret`` of its `StoreServer`. Jobs that meet there at the
    same time each have a name, ``job``. These win over the environment, which may give the last three
    (MULTIRING_STORE, MULTIRING_SECRET_FILE, MULTIRING_JOB).

    ``options`` are settings (docs/settings.md) in lower case and without prefix; they win over the environment. Called
    again it returns the communicator that is there. RendezvousError names who did not come or cannot be reached.
    """
    from multiring.job import bootstrap, growth, rendezvous, reports  # what only a job needs
    from multiring.job.given import given_identity

    env.warn_unknown()
    settings = env.read(env.Settings, **options)
    if settings.metrics:
        from multiring import metrics

        metrics.check(settings.metrics)
    given = given_identity(rank, world_size, store, secret, job)
    with _lock:
        if _default is None:
            if given is None:
                _refuse_to_impersonate()
                identity = bootstrap.rank_identity()
            else:
                identity = given.identity()
            join = growth.enter if identity.replacement else rendezvous.join
            reports.tell_stage("joins")
            try:
                adopt(Communicator(Group(join(identity, settings))), given)
            except (PeerLost, CollectiveTimeout):
                if not (identity.replacement and is_initialized()):
                    raise
                _shrunk(None)  # with those who have admitted this one
            _show_metrics()
        elif given is not None and given != _given:
            raise ValueError(
                f"multiring is initialised, and not as init(rank={given.rank}, world_size={given.world_size}) at this "
                "store and in this job: call shutdown() first"
            )
        elif options and settings != _default.world.settings:
            raise ValueError(f"multiring is initialised with other settings than {options}: call shutdown() first")
        return _communicator(None)


def adopt(communicator: Communicator, given: GivenIdentity | None = None) -> None:
    """Make ``communicator`` the default one, to be shut down when the process exits.

    ``given`` are the arguments by which its job was joined, None if the environment said so.
    """
    from multiring.job import bootstrap, status

    global _default, _given, _teller, _has_reported
    bootstrap.report(None)
    _default, _given, _has_reported = communicator, given, False
    _native.call_before_errors(_report_failure)
    if _teller is None:
        _teller = status.teller(communicator)
    else:
        _teller.follow(communicator)
    if _exporter is not None:
        _exporter.follow(communicator)
    if communicator.world.recorder is not None:
        communicator.world.recorder.watch(communicator.world.engine)
    if communicator.world.timeline is not None and communicator.size > 1:
        timeline = communicator.world.timeline
        timeline.offset = clocks.job_offset(group_of(communicator).internal, timeline.offset)
    atexit.unregister(_exit)
    atexit.register(_exit)


def _report_failure() -> None:
    """Tell the launcher why the job fails before the program hears of it, which may end at once, by `os._exit`.

    The caller may hold the lock, or be a thread of its own for which another one waits that is told. The program gets
    its error in any case.
    """
    global _has_reported
    with _reporting:  # a second thread hears of it when the first has reported
        communicator = _default  # another thread may shut down meanwhile
        if _has_reported or communicator is None or (world := communicator.world).engine.failure() is None:
            return
        _has_reported = True
        try:
            from multiring.job import bootstrap

            bootstrap.report(_blamed(world), world.account(), world.disputed(), is_final=world.has_failed_for_good())
        except Exception as error:
            _log.warning("the launcher is not told why the job fails: %s", error)


def _show_metrics() -> None:
    """Show the metrics of the default communicator, where that is asked for. Leaves the job if they cannot be
    served."""
    global _exporter
    communicator = _communicator(None)
    if not communicator.world.settings.metrics:
        return
    from multiring import metrics

    exporter = metrics.Exporter(communicator)
    try:
        exporter.serve(communicator.world.settings.metrics, communicator.local_rank)
    except MultiringError as error:
        _blame(error)
        _leave_locked()
        raise
    _exporter = exporter


def _hide_metrics() -> None:
    global _exporter
    if _exporter is not None:
        leaving, _exporter = _exporter, None
        leaving.close()


def _tell_status_no_more() -> None:
    global _teller
    if _teller is not None:
        leaving, _teller = _teller, None
        leaving.close()


def before_leaving(wait: Callable[[], object]) -> None:
    """Have ``wait`` called before this rank leaves in good order: it returns when what was dispatched is done."""
    _dispatched.append(wait)


def shutdown() -> None:
    """Leave the job: pending works fail, everything is released, and `init` may be called again.

    Raises Mismatch, when all is released, if a call that completed here was another one elsewhere.
    Steps that JAX has dispatched are waited for, unless a rank was lost.
    """
    try:
        if _default is not None and _default.world.engine.failure() is None:
            for wait in _dispatched:
                wait()
    finally:
        _leave()


def _leave() -> None:
    with _lock:
        _leave_locked()


def _leave_locked() -> None:
    from multiring.job import bootstrap

    global _default
    _hide_metrics()
    _tell_status_no_more()
    if _default is not None:
        leaving, _default = _default, None
        _native.call_before_errors(None)
        world = leaving.world
        account = world.account()
        bootstrap.report(_blamed(world), account, world.disputed(), is_final=world.has_failed_for_good())
        try:
            world.close()
        except Mismatch:
            bootstrap.report(None, account, world.disputed(), is_final=True)
            raise


def shrink(timeout: float | None = None) -> Agreement:
    """Go on without the ranks that were lost: to be called by all survivors after PeerLost or CollectiveTimeout.

    After the CollectiveTimeout of ``work.wait(timeout)`` no rank is lost: the call goes on, up to its own time-out.

    The survivors agree on who they are and on the last collective that all of them completed, get new ranks in the
    order of the old ones, and plan anew, without a restart of the processes. Afterwards the default communicator is
    theirs; groups, arrays of `empty` to be zero-copy, and what was built on the old one are to be made again. Ranks
    that live and have not called this are waited for ``timeout`` seconds (None: MULTIRING_INIT_TIMEOUT). More than half
    of the ranks go on, or half of them with rank 0. RendezvousError for all others, and for a rank that was taken for
    lost: they have left the job then. Losses that follow meanwhile are part of what is agreed on.
    """
    with _lock:
        return _shrunk(timeout)


def _shrunk(timeout: float | None) -> Agreement:
    from multiring.job import growth

    before = _communicator(None).world.membership
    agreement: Agreement | None = None
    while True:
        communicator, agreed = _survived(timeout)
        agreement = agreed if agreement is None else agreement.then(agreed)
        try:
            adopt(communicator, _given)
        except (PeerLost, CollectiveTimeout) as error:
            _log.warning("the survivors try again, as another loss has followed: %s", error)
            continue
        if _given is None:
            growth.report_excluded(before, communicator.world)
        return agreement


def _survived(timeout: float | None) -> tuple[Communicator, Agreement]:
    """Return the communicator of the survivors, who have left the default one, and what they have agreed on."""
    from multiring.job import survivors

    global _default
    communicator = _communicator(None)
    former = communicator.world
    failure = former.engine.failure()
    if failure is None:
        raise MultiringError(
            "no rank was lost: shrink() is called after the PeerLost or CollectiveTimeout of a call. After that "
            "of work.wait(timeout) the call goes on: wait() without a limit, until it ends or raises by its own "
            "timeout"
        )
    _report_failure()
    if not isinstance(failure, (PeerLost, CollectiveTimeout)):
        raise failure
    seconds = former.settings.init_timeout if timeout is None else time_limit(timeout)
    completed, account = former.engine.completed(0), former.account()
    _default = None
    if _teller is not None:
        _teller.pause("shrinks")
    try:
        world, agreement = survivors.shrink(former, completed, seconds)
    except BaseException:
        _hide_metrics()
        _tell_status_no_more()
        flight_recorder.requests.let_go()
        raise
    world.follow(former, account)
    return Communicator(Group(world, timeout=communicator.timeout)), agreement


def grow(timeout: float | None = None) -> Agreement | None:
    """Admit the ranks that the launcher has started in the place of lost ones: all ranks call it, between collectives.

    None if nobody waits to be admitted (that costs a broadcast of one byte, and rank 0 a look into the launcher's
    store), as always where no launcher starts replacements; or if it fails because of a newcomer: the log says which,
    and the job goes on as it was. Otherwise the default communicator is that of the larger world, whose ranks stand in
    the order that they had at the job's start; ``members[r]`` is the rank that rank r had before, -1 for a newcomer,
    whose `init` returns now. Groups, arrays of `empty` to be zero-copy, and what was built on the old one are to be
    made again; what newcomers lack they get from rank `oldest`. All have ``timeout`` seconds to meet (None:
    MULTIRING_INIT_TIMEOUT, or 4 MULTIRING_HEARTBEAT_TIMEOUT if that is less). PeerLost where one of those that are
    there is lost meanwhile: then `shrink` may be called. RendezvousError where the launcher's store cannot be reached:
    the job goes on as it was, unless the message says that this rank has left it.
    """
    from multiring.job import growth

    global _default
    with _lock:
        communicator = _communicator(None)
        try:
            seconds = None if timeout is None else time_limit(timeout)
            grown = growth.grow(communicator, seconds, launched=_given is None)
        except growth.Excluded:
            _default = None
            _hide_metrics()
            _tell_status_no_more()
            communicator.world.close()
            raise
        if grown is None:
            return None
        world, agreement = grown
        world.follow(communicator.world, communicator.world.account())
        try:
            adopt(Communicator(Group(world, timeout=communicator.timeout)))
        except (PeerLost, CollectiveTimeout) as error:
            _log.warning("the larger world shrinks before it was used: %s", error)
            agreement = agreement.then(_shrunk(None))
        finally:
            communicator.world.close()
        return agreement


def release(communicator: Communicator) -> None:
    """Shut down if this is still the default communicator, which the survivors of a loss replace."""
    if _default is communicator:
        shutdown()


def _blamed(world: World) -> int | None:
    """The rank that caused this one's failure, if another did, for the launcher."""
    failure = world.engine.failure()
    blamed = failure.rank if isinstance(failure, (PeerLost, CollectiveTimeout)) else -1
    return None if blamed in (-1, world.rank) else world.membership.members[blamed]


def is_initialized() -> bool:
    """True if there is a default communicator."""
    return _default is not None


def _refuse_to_impersonate() -> None:
    """A forked process that has the environment of its parent would join as the same rank."""
    if _inherited is not None and _inherited.size > 1 and _marks == [os.environ.get(name) for name in env.RANKS]:
        raise MultiringError(
            f"this process was forked from rank {_inherited.rank} of {_inherited.size}, and its environment is still "
            "that rank's: leave collectives to the rank itself; a process that is to be a rank of a job of its own is "
            "started by `multiring run`, gives init() its own rank, world_size and store, or has its own "
            "MULTIRING_RANK, MULTIRING_WORLD_SIZE and MULTIRING_STORE set before init()"
        )


def joined(group: Communicator | None) -> Communicator:
    """``group``, or the default communicator, which is made as `init` does if there is none; TypeError for all else."""
    return init() if group is None else _communicator(group)


def _communicator(group: Communicator | None) -> Communicator:
    if group is not None:
        if not isinstance(group, Communicator):
            raise TypeError(f"group={group!r}: a communicator is needed, such as new_group returns")
        return group
    if _default is None:
        where = " in this process, which was forked from one that is" if _inherited else ""
        raise MultiringError(f"multiring is not initialised{where}: call multiring.init() first")
    return _default


def _exit() -> None:
    """Say farewell at exit; to the others an uncaught exception is the loss of this rank, with its reason.

    What leaving finds out cannot be raised any more: it is printed, and the process ends with a code that is not 0.
    """
    if _default is None:
        return
    interactive = hasattr(sys, "ps1")  # there the last exception ended a line, and not the session
    error = None if interactive else getattr(sys, "last_value", None)
    rank, host = _default.world.rank, _default.world.topology.hosts[_default.world.rank]
    if error is not None:
        _blame(error)
    try:
        shutdown()
    except MultiringError as late:
        print(f"multiring: rank {rank} (host {host}): {type(late).__name__}: {late}", file=sys.stderr, flush=True)
        from multiring import _native

        _native.exit_with_failure()


def abandon(error: BaseException) -> None:
    """Leave the job because of ``error``: to the others that is the loss of this rank, and they are told the reason.

    Nothing happens where `init` was not called. What leaving itself finds out is raised as by `shutdown`.
    """
    if _default is not None:
        _blame(error)
        shutdown()


def _blame(error: BaseException) -> None:
    assert _default is not None
    if _default.size > 1:
        rank, host = _default.world.rank, _default.world.topology.hosts[_default.world.rank]
        reason = f"rank {rank} (host {host}) ended with {type(error).__name__}: {_said_by(error)}"
        _default.world.engine.fail("PeerLost", rank, reason)


def _said_by(error: BaseException) -> str:
    """The text of any exception, as it can be sent: what is no character in it (of a file's name, say) is spelt out."""
    try:
        text = str(error)
    except Exception:  # it is the user's code that makes it
        text = "its text cannot be had"
    return text.encode("utf-8", "backslashreplace").decode()


def _leave_in_child() -> None:
    global _default, _exporter, _inherited, _lock, _marks, _reporting, _teller
    if _exporter is not None:
        _exporter.leave_in_child()
        _exporter = None
    _teller = None  # its thread is the parent's
    if (reports := sys.modules.get("multiring.job.reports")) is not None:
        reports.leave_in_child()
    _default, _inherited, _lock = None, _default or _inherited, threading.Lock()
    _reporting = threading.RLock()
    _marks = [os.environ.get(name) for name in env.RANKS]


os.register_at_fork(after_in_child=_leave_in_child)


def rank(group: Communicator | None = None) -> int:
    """Index of this process in the job, or in ``group``."""
    return _communicator(group).rank


def world_size(group: Communicator | None = None) -> int:
    """Number of processes in the job, or in ``group``."""
    return _communicator(group).size


def local_rank(group: Communicator | None = None) -> int:
    """Index of this process among those of its host."""
    return _communicator(group).local_rank


def local_world_size(group: Communicator | None = None) -> int:
    """Number of processes on this host."""
    return _communicator(group).local_size


def oldest(group: Communicator | None = None) -> int:
    """The lowest of the ranks that have been in the job for longest: from it newcomers get what they lack."""
    return _communicator(group).oldest


def _method(function: _T) -> _T:
    """Give a function the docstring of the method that it stands for."""
    function.__doc__ = getattr(Communicator, function.__name__).__doc__
    return function


@_method
def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    residual: Any = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).all_reduce(x, op, residual=residual, async_op=async_op, timeout=timeout)


@_method
def broadcast(
    x: Any,
    root: int = 0,
    *,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).broadcast(x, root, async_op=async_op, timeout=timeout)


@_method
def reduce(
    x: Any,
    op: str = "sum",
    root: int = 0,
    *,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).reduce(x, op, root, async_op=async_op, timeout=timeout)


@_method
def all_gather(
    x: Any,
    *,
    out: Any = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).all_gather(x, out=out, async_op=async_op, timeout=timeout)


@_method
def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).reduce_scatter(x, op, out=out, async_op=async_op, timeout=timeout)


@_method
def all_to_all(
    x: Any,
    splits: Sequence[int] | None = None,
    *,
    out: Any = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).all_to_all(x, splits, out=out, async_op=async_op, timeout=timeout)


@_method
def barrier(*, group: Communicator | None = None, async_op: bool = False, timeout: float | None = None) -> Any:
    return _communicator(group).barrier(async_op=async_op, timeout=timeout)


@_method
def send(
    x: Any,
    dst: int,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).send(x, dst, tag, async_op=async_op, timeout=timeout)


@_method
def recv(
    x: Any,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).recv(x, src, tag, async_op=async_op, timeout=timeout)


@_method
def gather(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).gather(x, root, out=out, async_op=async_op, timeout=timeout)


@_method
def scatter(
    x: Any,
    blocks: Any = None,
    root: int = 0,
    *,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    return _communicator(group).scatter(x, blocks, root, async_op=async_op, timeout=timeout)


@_method
def broadcast_object(
    value: Any = None, root: int = 0, *, timeout: float | None = None, group: Communicator | None = None
) -> Any:
    return _communicator(group).broadcast_object(value, root, timeout=timeout)


@_method
def all_gather_object(value: Any, *, timeout: float | None = None, group: Communicator | None = None) -> list[Any]:
    return _communicator(group).all_gather_object(value, timeout=timeout)


@_method
def new_group(ranks: Sequence[int], *, timeout: float | None = None) -> Communicator | None:
    return _communicator(None).new_group(ranks, timeout=timeout)


@_method
def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    return _communicator(None).empty(shape, dtype)


@_method
def plan(nbytes: int, collective: str = "all_reduce", root: int = 0, *, group: Communicator | None = None) -> Choice:
    return _communicator(group).plan(nbytes, collective, root)


@_method
def stats(*, group: Communicator | None = None) -> dict[str, Any]:
    return _communicator(group).stats()


def report(
    path: str | os.PathLike[str],
    title: str = "",
    *,
    answer: str = "",
    sections: Sequence[str] = (),
    group: Communicator | None = None,
) -> None:
    """Write a page about this job so far: topology, plans, predicted and measured times, who waits for whom, and why.

    All ranks call it; rank 0 writes the file, HTML that needs no network. ``answer``, rank 0's, is the first line in
    the place of who waits for whom; ``sections`` are HTML that follows it, such as ``multiring.pages.page`` makes of
    tables and curves. OSError if the file cannot be written.
    """
    from multiring.launch import summary
    from multiring.pages import page

    if not os.fspath(path):
        raise ValueError("path='': expected the name of a file, such as report.html")
    members = _communicator(group)
    counted = members.stats()
    mine = members.rank, members.hosts[members.rank], counted["seconds_in_calls"], counted["seconds_waiting"]
    used = members.plans_used()
    sampler, positions = members.world.sampler, {rank: position for position, rank in enumerate(members.members)}
    slow = [
        {**each, "ranks": [positions[rank] for rank in each["ranks"]]}
        for each in counted["slow_so_far"]
        if positions.keys() >= set(each["ranks"])
    ]
    places = [] if sampler is None else list(sampler.places.items())
    seen = {"slow": slow, "slow_links": counted["slow_links_so_far"], "places": places}
    told = members.all_gather_object((mine, seen))
    ranks = [page.RankTimes(*times) for times, _ in told]
    if members.rank == 0:
        hosts = dict(enumerate(members.hosts))
        accounts = {rank: account for rank, (_, account) in enumerate(told)}
        said = [*summary.slow_ranks(accounts, hosts), *summary.slow_links(accounts)]
        said = [f"{line[0].upper()}{line[1:]}." for line in said]
        topology = members.world.topology.restrict(members.members)
        title = title or f"A job of {members.size} ranks"
        write_text(Path(path), page.of_job(title, topology, used, ranks, said, answer, sections))


def shard(
    length: int,
    epoch: int = 0,
    seed: int = 0,
    uneven: str = "keep",
    *,
    group: Communicator | None = None,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """This rank's indices of one shuffle of 0 to ``length`` - 1 that all ranks agree on, another for each ``epoch``.

    ``uneven`` says what becomes of a length that the number of ranks does not divide: "keep" gives some ranks one
    index more, "pad" repeats the first of the shuffle, "drop" leaves out its last.
    """
    members = _communicator(group)
    return sharding.shard(length, members.rank, members.size, epoch, seed, uneven)


def average(metrics: _M, weight: float = 1.0, *, group: Communicator | None = None) -> _M:
    """The mean over all ranks of a number, or of each number of a dictionary with the same keys on all ranks.

    ``weight`` is for how much this rank counts: the number of samples that the metrics were taken on. A rank of weight
    0 only listens. ValueError, on all ranks, if all weights are 0.
    """
    return weights.average(_communicator(group), metrics, weight)
