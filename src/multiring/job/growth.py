"""The ranks that are there admit newcomers, and all become the next generation of the job (admission.py).

The larger world is made beside the one that is there, which is left when the verdict says so. Until then nothing of it
is touched: where a newcomer is lost or does not fit, those who are there go on as they were.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np

from multiring import env
from multiring.errors import MultiringError, RendezvousError
from multiring.job import bootstrap, rendezvous
from multiring.job.admission import ANSWER_SECONDS, Admission, JoinQueue, NotAdmitted, Record, exclude
from multiring.job.bootstrap import RankIdentity, no_meeting
from multiring.job.checks import Terms, check_settings, difference
from multiring.job.exchange import Exchange
from multiring.job.store import Client
from multiring.job.survivors import Agreement
from multiring.net.membership import Membership
from multiring.runtime import flight_recorder
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.world import World

REPORT_SECONDS = 5.0
"""Seconds that the survivors' rank 0 tries to reach the launcher, which only ends what they go on without."""

_log = logging.getLogger("multiring")


class Excluded(RendezvousError):
    """The others may have gone on without this rank, which has left the job."""


def grow(communicator: Communicator, timeout: float | None, *, launched: bool = True) -> tuple[World, Agreement] | None:
    """The world of the ranks of ``communicator``, the job's, and those that it has admitted; None if there are none.

    There are none where no launcher has ``launched`` the job: nobody starts replacements.
    ``timeout`` in seconds is for all to meet. Where this raises anything but Excluded, the old world is as it was.
    """
    if not launched:
        _told(communicator, None)
        return None
    world = communicator.world
    completed = world.engine.completed(0) - 1
    seconds = _patience(world.settings) if timeout is None else timeout
    with contextlib.ExitStack() as stack:
        identity, label = bootstrap.rank_identity(), world.membership.members[world.rank]
        admission: Admission | None = None
        member_list: Record | None = None
        if communicator.rank == 0 and world.acceptor is not None and env.read(env.Launch).store:
            try:
                admission, member_list = _look(
                    stack.enter_context(_join_queue(identity, world.settings)), world, seconds
                )
            except RendezvousError as error:
                member_list = {"error": f"rank 0 cannot look who is to be admitted: {error}"}
        member_list = _told(communicator, member_list)
        if member_list is None:
            return None
        if "error" in member_list:
            raise RendezvousError(member_list["error"])
        try:
            if admission is None:
                queue = stack.enter_context(_join_queue(identity, world.settings))
                admission = queue.join(member_list["admission"], f"rank {label}")
            joined = _meet(admission, member_list, label, identity, world.settings_again, world.engine.failure)
        except Excluded:
            raise
        except RendezvousError as refused:  # NotAdmitted, or this rank did not get as far as to meet
            own = not isinstance(refused, NotAdmitted)
            stack.close()  # lest the others wait for this one
            # Raises if it was one of those who are there.
            group_of(communicator).internal.barrier(timeout=communicator.timeout + seconds)
            if communicator.rank == 0 or own:
                _log.warning("nobody was admitted, and the job goes on with %d ranks: %s", communicator.size, refused)
            return None
    before = {label: rank for rank, label in enumerate(world.membership.members)}
    members = tuple(before.get(label, -1) for label in joined.membership.members)
    return replace(joined, settings=world.settings), Agreement(joined.membership.generation, members, completed)


def report_excluded(before: Membership, world: World) -> None:
    """Rank 0 reports to the launcher which members of ``before`` were left out."""
    if world.rank != 0 or not env.read(env.Launch).store:
        return
    entered = dict(zip(before.members, before.entered, strict=True))
    gone = {rank: entered[rank] for rank in before.members if rank not in world.membership.members}
    identity = bootstrap.rank_identity()
    try:
        with identity.meet(replace(world.settings, init_timeout=REPORT_SECONDS)) as meeting:
            exclude(cast(Client, meeting.store), identity.job, identity.restart, gone)
    except RendezvousError as error:
        _log.warning("the launcher does not know that the job goes on without ranks %s: %s", sorted(gone), error)


def enter(identity: RankIdentity, settings: env.Settings) -> World:
    """Wait to be admitted by the ranks that are there; the world that they and this one make then.

    RendezvousError if that does not happen in time, or this one does not fit.
    """
    check_settings(settings)
    until = time.monotonic() + settings.init_timeout
    with flight_recorder.requests.held(settings.flight_recorder_signal), _join_queue(identity, settings) as queue:
        host = settings.host_name
        introduction = {"rank": identity.rank, "host": host, "agreed": env.agreed(settings)}
        join_id = queue.apply({**introduction, "replacement": identity.replacement})
        for number in itertools.count(1):
            try:
                admission = queue.invitation(join_id, number, until, f"the newcomer of rank {identity.rank}")
                member_list = admission.answer(join_id, until)
            except NotAdmitted:
                continue
            except TimeoutError:
                raise RendezvousError(
                    f"rank {identity.rank}, which takes the place of one that was lost, was not admitted within "
                    f"{settings.init_timeout:g} s (MULTIRING_INIT_TIMEOUT): the others do that when they call grow()"
                ) from None
            if member_list is not None:
                membership = Membership.decode(member_list["membership"])
                queue.enter(identity.replacement, admission)
                try:
                    return _meet(admission, member_list, identity.rank, identity, settings, lambda: None)
                except NotAdmitted as refused:
                    _raise_own(refused.__cause__, membership.members.index(identity.rank))
    raise AssertionError("not reached")


def _raise_own(error: BaseException | None, rank: int) -> None:
    """Raise an error of this rank; return after an error of others, and this rank waits once more."""
    another = isinstance(error, MultiringError) and error.rank not in (-1, rank)
    unknown = isinstance(error, RendezvousError) and error.rank == -1
    if error is not None and not another and not unknown:
        raise error


def _patience(settings: env.Settings) -> float:
    return min(settings.init_timeout, rendezvous.REJOIN_HEARTBEATS * settings.heartbeat_timeout)


@contextlib.contextmanager
def _join_queue(identity: RankIdentity, settings: env.Settings) -> Iterator[JoinQueue]:
    with identity.meet(settings) as meeting:
        yield JoinQueue(cast(Client, meeting.store), identity.job, identity.restart)


def _look(queue: JoinQueue, world: World, seconds: float) -> tuple[Admission | None, Record | None]:
    """The list of members with those who may come and have answered, if there are any."""
    fitting: dict[int, int] = {}
    replacements: dict[int, int] = {}
    mine = Terms(world.topology.hosts[world.rank], env.agreed(world.settings))
    members = world.membership.members
    for join_id, newcomer in queue.waiting().items():
        rank = newcomer["rank"]
        if rank in members:
            continue
        its = Terms(newcomer["host"], newcomer["agreed"])
        different = difference(f"rank {rank}", its, f"rank {members[world.rank]}", mine)
        if different:
            _log.warning("a newcomer was refused: %s", different)
            queue.refuse(join_id, different)
        else:
            fitting[rank], replacements[rank] = join_id, newcomer["replacement"]
    if not fitting:
        return None, None
    admission = queue.admission(f"rank {members[world.rank]}")
    invited = {rank: join_id for rank, join_id in fitting.items() if queue.invite(admission, join_id)}
    try:
        came = admission.answered(invited)
    except NotAdmitted as refused:  # the others that wait are invited by the next call
        _log.warning("nobody was admitted: %s", refused)
        return None, None
    for rank in invited.keys() - came.keys():
        why = f"this rank did not answer within {ANSWER_SECONDS:g} s when it was invited"
        queue.give_up(invited[rank], replacements[rank], why)
        _log.warning("rank %d waited to be admitted, and did not answer within %g s", rank, ANSWER_SECONDS)
    if not came:
        return None, None
    member_list = {
        "admission": admission.key,
        "join_ids": sorted(came.values()),
        "membership": world.membership.admitting(came).encode(),
        "topology": world.measured,
        "seconds": seconds,
    }
    admission.call(member_list)
    return admission, member_list


def _told(communicator: Communicator, member_list: Record | None) -> Record | None:
    """Return on all ranks what rank 0 has found. Whatever comes of it, `grow` is one call of the communicator."""
    someone = np.array([member_list is not None], np.uint8)
    communicator.broadcast(someone, timeout=communicator.timeout + 2 * ANSWER_SECONDS)
    return group_of(communicator).internal.broadcast_object(member_list) if someone[0] else None


def _meet(
    admission: Admission,
    member_list: Record,
    rank_at_start: int,
    at_start: RankIdentity,
    settings: env.Settings,
    failure: Callable[[], BaseException | None],
) -> World:
    """The world of all on the list of members.

    NotAdmitted if it has not come about, Excluded if it may have without this rank.
    """
    membership = Membership.decode(member_list["membership"])
    rank, size = membership.members.index(rank_at_start), len(membership.members)
    identity = RankIdentity(rank, size, "grow", no_meeting, at_start.job, at_start.restart, membership=membership)
    secret = bootstrap.given_secret(env.read(env.Launch))
    admission.failure = failure
    exchange = Exchange(admission, "meet", rank, size, member_list["seconds"])
    with contextlib.ExitStack() as undo:
        try:
            joined = rendezvous.join_beside(
                identity, settings, exchange, secret, member_list["topology"], admission.ended
            )
            undo.callback(joined.close)
            error, reason = None, _concluded(admission)
        except Excluded:
            raise
        except Exception as failed:
            error, reason = failed, _concluded(admission, str(failed) or type(failed).__name__)
        if reason:
            raise NotAdmitted(reason) from error
        if error is not None:
            raise Excluded(
                f"the job went on as generation {membership.generation} without this rank: {error}"
            ) from error
        undo.pop_all()
        return joined


def _concluded(admission: Admission, reason: str = "") -> str:
    try:
        return admission.conclude(reason)
    except RendezvousError as error:
        raise Excluded(f"whether the job went on without this rank cannot be known: {error}") from error
