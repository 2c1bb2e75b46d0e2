"""The ranks that are there admit newcomers, and all become the next generation of the job (admission.py).

The larger world is made beside the one that is there, which is left when the verdict says so. Until then nothing of it
is touched: where a newcomer is lost or does not fit, those who are there go on as they were.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np

from multiring import env
from multiring.errors import MultiringError, RendezvousError
from multiring.job import bootstrap, rendezvous
from multiring.job.admission import ANSWER_SECONDS, Admission, Kept, Lobby, Record
from multiring.job.bootstrap import Place, no_meeting
from multiring.job.exchange import Exchange
from multiring.job.membership import Agreement
from multiring.job.store import Client
from multiring.runtime.comm import Communicator
from multiring.runtime.world import World

_log = logging.getLogger("multiring")


class Excluded(RendezvousError):
    """The others may have gone on without this rank, which has left the job."""


def grow(communicator: Communicator, timeout: float | None) -> tuple[World, Agreement] | None:
    """The world of the ranks of ``communicator``, the job's, and those that it has admitted; None if there are none.

    ``timeout`` in seconds is for all to meet. Where this raises anything but Excluded, the old world is as it was.
    """
    world = communicator.world
    completed = world.engine.completed(0) - 1
    seconds = _patience(world.settings) if timeout is None else timeout
    with contextlib.ExitStack() as stack:
        place, label = bootstrap.place(), world.members[world.rank]
        admission: Admission | None = None
        roster: Record | None = None
        if communicator.rank == 0 and world.gate is not None and env.read(env.Launch).store:
            try:
                admission, roster = _look(stack.enter_context(_lobby(place, world.settings)), world, seconds)
            except RendezvousError as error:
                roster = {"error": f"rank 0 cannot look who is to be admitted: {error}"}
        roster = _told(communicator, roster)
        if roster is None:
            return None
        if "error" in roster:
            raise RendezvousError(roster["error"])
        if admission is None:
            lobby = stack.enter_context(_lobby(place, world.settings))
            admission = lobby.join(roster["admission"], f"rank {label}")
        try:
            joined = _meet(admission, roster, label, place, world.settings_again, world.engine.failure)
        except Kept as kept:
            # Raises if it was one of those who are there.
            communicator.aside.barrier(timeout=communicator.timeout + seconds)
            if communicator.rank == 0:
                _log.warning("nobody was admitted, and the job goes on with %d ranks: %s", communicator.size, kept)
            return None
    before = {label: rank for rank, label in enumerate(world.members)}
    members = tuple(before.get(label, -1) for label in joined.members)
    return replace(joined, settings=world.settings), Agreement(roster["generation"], members, completed)


def enter(place: Place, settings: env.Settings) -> World:
    """Wait to be admitted by the ranks that are there; the world that they and this one make then.

    RendezvousError if that does not happen in time, or this one does not fit.
    """
    rendezvous.check_settings(settings)
    until = time.monotonic() + settings.init_timeout
    with _lobby(place, settings) as lobby:
        host = settings.host or socket.gethostname()
        ticket = lobby.apply({"rank": place.rank, "host": host, "agreed": env.agreed(settings)})
        for number in itertools.count(1):
            try:
                admission = lobby.invitation(ticket, number, until, f"the newcomer of rank {place.rank}")
                roster = admission.answer(ticket, until)
            except Kept:
                continue
            except TimeoutError:
                raise RendezvousError(
                    f"rank {place.rank}, which takes the place of one that was lost, was not admitted within "
                    f"{settings.init_timeout:g} s (MULTIRING_INIT_TIMEOUT): the others do that when they call grow()"
                ) from None
            if roster is not None:
                lobby.enter(place.replacement, admission)
                try:
                    return _meet(admission, roster, place.rank, place, settings, lambda: None)
                except Kept as kept:
                    _raise_own(kept.__cause__, roster["members"].index(place.rank))
    raise AssertionError("not reached")


def _raise_own(error: BaseException | None, rank: int) -> None:
    """What went wrong here is raised; after what others failed in, one waits again."""
    another = isinstance(error, MultiringError) and error.rank not in (-1, rank)
    unknown = isinstance(error, RendezvousError) and error.rank == -1
    if error is not None and not another and not unknown:
        raise error


def _patience(settings: env.Settings) -> float:
    return min(settings.init_timeout, rendezvous.REJOIN_HEARTBEATS * settings.heartbeat_timeout)


@contextlib.contextmanager
def _lobby(place: Place, settings: env.Settings) -> Iterator[Lobby]:
    with place.meet(settings) as meeting:
        yield Lobby(cast(Client, meeting.store), place.job, place.restart)


def _look(lobby: Lobby, world: World, seconds: float) -> tuple[Admission | None, Record | None]:
    """The roster with those who may come and have answered, if there are any."""
    fitting: dict[int, int] = {}
    mine = {"host": world.topology.hosts[world.rank], "agreed": env.agreed(world.settings)}
    for ticket, newcomer in lobby.waiting().items():
        rank = newcomer["rank"]
        if rank in world.members:
            continue
        different = rendezvous.difference(f"rank {rank}", newcomer, f"rank {world.members[world.rank]}", mine)
        if different:
            _log.warning("a newcomer was refused: %s", different)
            lobby.refuse(ticket, different)
        else:
            fitting[rank] = ticket
    if not fitting:
        return None, None
    assert world.gate is not None
    admission = lobby.admission(f"rank {world.members[world.rank]}")
    invited = {rank: ticket for rank, ticket in fitting.items() if lobby.invite(admission, ticket)}
    try:
        came = admission.answered(invited)
    except Kept as kept:  # the others that wait are invited by the next call
        _log.warning("nobody was admitted: %s", kept)
        return None, None
    for rank in invited.keys() - came.keys():
        lobby.refuse(invited[rank], f"this rank did not answer within {ANSWER_SECONDS:g} s when it was invited")
        _log.warning("rank %d waited to be admitted, and did not answer within %g s", rank, ANSWER_SECONDS)
    if not came:
        return None, None
    generation = world.gate.membership.generation + 1
    entered = {**dict(zip(world.members, world.entered, strict=True)), **dict.fromkeys(came, generation)}
    members = sorted(entered)
    roster = {
        "admission": admission.key,
        "tickets": sorted(came.values()),
        "generation": generation,
        "members": members,
        "entered": [entered[rank] for rank in members],
        "topology": world.measured,
        "seconds": seconds,
    }
    admission.call(roster)
    return admission, roster


def _told(communicator: Communicator, roster: Record | None) -> Record | None:
    """What rank 0 has found, on all ranks. Whatever comes of it, `grow` is one call of the communicator."""
    someone = np.array([roster is not None], np.uint8)
    communicator.broadcast(someone, timeout=communicator.timeout + 2 * ANSWER_SECONDS)
    return communicator.aside.broadcast_object(roster) if someone[0] else None


def _meet(
    admission: Admission,
    roster: Record,
    rank_at_start: int,
    at_start: Place,
    settings: env.Settings,
    failure: Callable[[], BaseException | None],
) -> World:
    """The world of all on the roster; Kept if it has not come about, Excluded if it may have without this rank."""
    members, generation = tuple(roster["members"]), roster["generation"]
    rank = members.index(rank_at_start)
    entered = tuple(roster["entered"])
    place = Place(
        rank,
        len(members),
        "grow",
        no_meeting,
        at_start.job,
        at_start.restart,
        generation,
        members=members,
        entered=entered,
    )
    secret = bootstrap.given_secret(env.read(env.Launch))
    admission.failure = failure
    exchange = Exchange(admission, "meet", rank, len(members), roster["seconds"])
    with contextlib.ExitStack() as undo:
        try:
            joined = rendezvous.join_beside(place, settings, exchange, secret, roster["topology"], admission.ended)
            undo.callback(joined.close)
            error, reason = None, _concluded(admission)
        except Excluded:
            raise
        except Exception as failed:
            error, reason = failed, _concluded(admission, str(failed) or type(failed).__name__)
        if reason:
            raise Kept(reason) from error
        if error is not None:
            raise Excluded(f"the job went on as generation {generation} without this rank: {error}") from error
        undo.pop_all()
        return joined


def _concluded(admission: Admission, reason: str = "") -> str:
    try:
        return admission.conclude(reason)
    except RendezvousError as error:
        raise Excluded(f"whether the job went on without this rank cannot be known: {error}") from error
