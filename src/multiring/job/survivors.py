"""The survivors of a loss agree on who goes on, and become the next generation of the job, without a restart.

The lowest rank that is found leads. The others come to its acceptor, and it asks them twice:

    survivor                                   leader
      join: what I know and have accepted --->   waits for all who live
                                          <---   prepare: a ballot above all that anybody has promised
      promise                             --->   by all who came, who must be a quorum of the generation before
                                          <---   accept: the members (those that somebody has accepted, if any)
      accepted                            --->   by all who came
                                          <---   decided: generation, members, last collective that all completed

These are the ballots of Paxos (Lamport, The Part-Time Parliament, 1998), whose value is the next membership and whose
quorum is more than half of the ranks of the last one, or half of them with its rank 0. Two sides of a cut can therefore
never both go on, whoever dies while they agree. A rank that was decided against learns so from any acceptor. After the
decision the same connections serve as the store in which the members meet (rendezvous.py); if one is lost before they
have, all begin again, from the membership that was decided.

Rank numbers in this module are those at the job's start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from multiring.errors import PeerLost, RendezvousError
from multiring.job import rendezvous
from multiring.job.late_ranks import RETRY_SECONDS, LateRanks
from multiring.job.leader_store import LeaderStore
from multiring.net import auth, dial
from multiring.net.acceptor import Acceptor, RankConnection
from multiring.net.closing import closed_on_error
from multiring.net.framing import Message
from multiring.net.loop import within
from multiring.net.membership import Membership
from multiring.runtime.world import World
from multiring.units import ranges

WATCH_AFTER_SECONDS = 0.5
"""Seconds after which a rank that has not come is looked for."""

ASKED_AT_ONCE = 16
"""Number of lower ranks that are asked at the same time whether they live."""

Ballot = tuple[int, int]

_log = logging.getLogger("multiring")


@dataclass(frozen=True)
class Agreement:
    """Agreement of the survivors of a loss, or of members that have admitted others.

    ``members[r]`` is the rank that rank r had before, -1 for one that was admitted. ``completed`` is the number of the
    last collective of the default communicator that all of them have completed, -1 if there is none.
    """

    generation: int
    members: tuple[int, ...]
    completed: int

    def then(self, later: Agreement) -> Agreement:
        """Both in one, where another loss followed before the caller heard of this one."""
        members = tuple(self.members[rank] for rank in later.members)
        return Agreement(later.generation, members, self.completed)


class _Again(Exception):
    """Another rank was lost, or this one learnt of a later generation."""


def is_quorum(present: Collection[int], members: Sequence[int]) -> bool:
    """True if some of the ``members`` may go on without the others: more than half, or half with the first."""
    found = len(set(present) & set(members))
    return 2 * found > len(members) or (2 * found == len(members) and members[0] in present)


def shrink(world: World, completed: int, timeout: float) -> tuple[World, Agreement]:
    """The world of the survivors of a failure, and what they have agreed on; ``world`` is left.

    ``completed`` collectives of the default communicator were completed here. Ranks that live and have not called this
    are waited for ``timeout`` seconds. RendezvousError where this rank has no part in the next generation.
    """
    acceptor = world.acceptor
    if acceptor is None:
        raise RendezvousError("this rank is alone in its job: there is nobody to go on with")
    failure = world.engine.failure()
    silent, apart, suspect = set(), set(), -1
    if isinstance(failure, PeerLost) and failure.rank >= 0:
        suspect = acceptor.membership.members[failure.rank]
    if isinstance(failure, PeerLost) and failure.seconds >= world.settings.heartbeat_timeout:
        apart = _given_up(failure, world)
        silent = {acceptor.membership.members[failure.rank], *apart}
    before = acceptor.membership
    world.leave()
    survivor = Survivor(acceptor, completed, timeout, silent, world.settings.late_warning, apart, suspect)
    reason = ""
    try:
        if acceptor.rank in apart:
            raise RendezvousError(_no_member(str(failure)))
        acceptor.loop.run(acceptor.look_for_survivors(True))
        while True:
            store = survivor.agree()
            try:
                joined = rendezvous.rejoin(world, acceptor, store, store.failure)
            except (RendezvousError, PeerLost) as error:  # another one was lost, maybe after it had been attached
                if str(error) != reason:
                    reason = str(error)
                    _log.warning("the survivors have not met, and try again: %s", reason)
                survivor.count_failure(error)
                continue
            finally:
                store.close()
            acceptor.loop.run(acceptor.look_for_survivors(False))
            members = tuple(map(before.members.index, acceptor.membership.members))
            return joined, Agreement(acceptor.membership.generation, members, store.completed - 1)
    except BaseException:
        acceptor.close()
        raise


def _given_up(failure: PeerLost, world: World) -> set[int]:
    """The ranks, those at the job's start, of the host that goes because it cannot reach another one."""
    hosts = world.topology.hosts
    if failure.apart < 0:
        return set()
    return {world.membership.members[rank] for rank, host in enumerate(hosts) if host == hosts[failure.rank]}


def _no_member(reason: str) -> str:
    return f"this rank can have no part in the next generation, and can only end: {reason}"


class Survivor:
    """One rank's part in the agreement."""

    def __init__(
        self,
        acceptor: Acceptor,
        completed: int,
        timeout: float,
        silent: Collection[int],
        late_seconds: float,
        apart: Collection[int] = (),
        suspect: int = -1,
    ) -> None:
        """``silent`` ranks are known to have been so for long enough; after ``late_seconds`` it is logged who is late:
        it lives, and has not called `shrink`. Those ``apart`` live, and cannot reach some of the others. The
        ``suspect`` is probably dead, and is looked for at once."""
        self._acceptor = acceptor
        self._rank = acceptor.rank
        self._lived = acceptor.membership.generation
        self._completed = completed
        self._silent = set(silent)
        self._apart = set(apart)
        self._suspect = suspect
        self._timeout = timeout
        self._began = time.monotonic()
        self._late = LateRanks(acceptor, self._began, late_seconds)
        self._idle: set[int] = set()
        """Ranks that answer, and say that they have not called `shrink`."""
        self._promised: Ballot = (0, 0)
        self._accepted: tuple[Ballot, tuple[int, ...]] | None = None
        self._settled: dict[int, int] = {}
        """Number of collectives of this rank's last world that all have completed, by generation: decided with each
        generation in whose meeting this rank took part."""
        self._handlers: dict[str, Callable[[RankConnection, Message], Awaitable[LeaderStore | None]]] = {
            "news": self._take_news,
            "admitted": self._wait_on,
            "minority": self._end,
            "prepare": self._promise,
            "accept": self._accept,
            "decided": self._go_on,
        }

    def agree(self) -> LeaderStore:
        """The store of the next generation, whose membership the acceptor knows then.

        RendezvousError where this rank is not in it.
        """
        while True:
            try:
                return self._acceptor.loop.run(self._attempt())
            except _Again as again:
                self.count_failure(RendezvousError(str(again)))

    def count_failure(self, reason: RendezvousError | PeerLost) -> None:
        """Time for another attempt, unless too much of it is over."""
        most = self._timeout + rendezvous.REJOIN_HEARTBEATS * self._acceptor.patience
        if time.monotonic() - self._began > most:
            raise RendezvousError(f"the survivors did not agree within {most:g} s: {reason}") from reason
        time.sleep(RETRY_SECONDS)

    async def _attempt(self) -> LeaderStore:
        found = await self._find_leader()
        if found is None:
            return await self._lead()
        rank, leader = found
        try:
            return await self._follow(rank, leader)
        except asyncio.TimeoutError:
            leader.close()
            self._silent.add(rank)
            self._late.leave_out({rank} & self._idle)
            raise _Again(f"the lowest rank lives, and has not taken this one's call in {self._timeout:g} s") from None
        except ConnectionError as error:
            leader.close()
            raise _Again(f"the lowest rank that was found is lost: {error}") from error
        except BaseException:
            leader.close()
            raise

    # ---- finding each other ----

    async def _find_leader(self) -> tuple[int, RankConnection] | None:
        """The lowest living rank below this one."""
        lower = [rank for rank in self._acceptor.membership.members if rank < self._rank]
        asked: dict[int, asyncio.Task[RankConnection | None]] = {}
        try:
            for position, rank in enumerate(lower):
                for each in lower[position : position + ASKED_AT_ONCE]:
                    if each not in asked:
                        asked[each] = asyncio.create_task(self._reach(each))
                connection = await asked.pop(rank)
                if connection is not None:
                    return rank, connection
            return None
        finally:
            for task in asked.values():
                task.cancel()
            for found in await asyncio.gather(*asked.values(), return_exceptions=True):
                if isinstance(found, RankConnection):
                    found.close()

    async def _reach(self, rank: int) -> RankConnection | None:
        """A connection to the acceptor of a rank; None if it is dead, or silent for longer than it may be."""
        until = max(self._began + self._acceptor.patience, time.monotonic() + 1)
        while rank not in self._silent:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return None
            attempt = dial.race(self._acceptor.addresses[rank], lambda at: self._knock(rank, at), _discard)
            try:
                connection, news = await within(remaining, attempt, _discard)
            except dial.Unreachable as unreachable:
                if all(isinstance(e, (ConnectionRefusedError, auth.Refused)) for e in unreachable.failures.values()):
                    return None
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except asyncio.TimeoutError:
                return None
            with closed_on_error(connection):
                await self._hear(rank, news)
            return connection
        return None

    async def _knock(self, rank: int, address: dial.Address) -> tuple[RankConnection, Message]:
        """A connection to one address, with what the rank there says first."""
        hello = replace(self._acceptor.hello, role=auth.SURVIVOR, rank=self._rank)
        channel = await dial.connect(address, auth.client(self._acceptor.secret, hello))
        connection = RankConnection(channel, self._acceptor.patience)
        with closed_on_error(connection):
            news = await connection.receive()
            if news["rank"] != rank:
                raise auth.Refused(f"it leads to rank {news['rank']}")
        return connection, news

    async def _hear(self, rank: int, news: Message) -> None:
        """Take in whether a rank has called `shrink`, and the generation that it knows."""
        if news["shrinking"]:
            self._idle.discard(rank)
        else:
            self._idle.add(rank)
        await self._learn(news)

    async def _learn(self, told: Message) -> None:
        """Go on from a later generation, if this rank is in it."""
        membership = Membership.decode(told)
        if membership.generation > self._acceptor.membership.generation:
            await self._decide(membership)
            raise _Again(f"generation {membership.generation} was decided on")

    async def _decide(self, membership: Membership) -> None:
        if self._rank not in membership.members:
            before = self._acceptor.membership.members
            raise RendezvousError(
                f"the job went on as generation {membership.generation} without this rank, which was rank "
                f"{before.index(self._rank)}: it did not answer the others, or did not call shrink(), in time, and can "
                "only end"
            )
        self._accepted = None
        await self._acceptor.announce(membership)

    # ---- one that follows ----

    def _join(self) -> Message:
        return {
            "rank": self._rank,
            **self._acceptor.membership.encode(),
            "promised": self._promised,
            "accepted": self._accepted,
            "lived": self._lived,
            "completed": self._completed,
        }

    async def _follow(self, rank: int, leader: RankConnection) -> LeaderStore:
        await leader.send(self._join())
        telling = asyncio.create_task(self._late.tell_of(lambda: {rank} & self._idle))
        try:
            told = await within(self._patience_with(rank), leader.receive())
            while told["kind"] == "news":
                await self._hear(rank, told)
                told = await within(self._patience_with(rank), leader.receive())
        finally:
            telling.cancel()
        while (store := await self._handlers[told["kind"]](leader, told)) is None:
            told = await leader.receive()
        return store

    def _patience_with(self, leader: int) -> float:
        """Seconds for which the leader is waited for: no longer than asked for if it has not called `shrink`."""
        left = max(0.0, self._began + self._timeout - time.monotonic())
        return max(left, WATCH_AFTER_SECONDS) if leader in self._late_ones() else left + self._acceptor.patience

    def _late_ones(self) -> set[int]:
        """Ranks that are waited for no longer than asked for, as they have not called `shrink`.

        Not those that went on into a generation in which this rank has not met them: they learn of that first.
        """
        return self._idle if self._acceptor.membership.generation == self._lived else set()

    async def _take_news(self, leader: RankConnection, told: Message) -> None:
        await self._learn(told)

    async def _wait_on(self, leader: RankConnection, told: Message) -> None:
        """The leader has taken this rank's call, and waits for others."""

    async def _end(self, leader: RankConnection, told: Message) -> None:
        raise RendezvousError(told["text"])

    async def _promise(self, leader: RankConnection, told: Message) -> None:
        self._promised = max(self._promised, tuple(told["ballot"]))
        await leader.send({"kind": "promise"})

    async def _accept(self, leader: RankConnection, told: Message) -> None:
        ballot = tuple(told["ballot"])
        if ballot < self._promised:
            raise _Again("a later ballot was promised to another rank")
        self._accepted = ballot, tuple(told["members"])
        await leader.send({"kind": "accepted"})

    async def _go_on(self, leader: RankConnection, told: Message) -> LeaderStore:
        await self._decide(Membership.decode(told))
        if not told["complete"]:
            raise _Again("a membership of before was decided on")
        completed = self._settle(told["lived"], told["completed"])
        return LeaderStore(self._acceptor, {self._acceptor.membership.members[0]: leader}, completed)

    def _settle(self, lived: int, completed: int) -> int:
        """Return the number of the last world's collectives that all have completed; ``completed`` are ``lived``'s."""
        # Others came to live in a generation in whose meeting this rank lost somebody: it has completed nothing there,
        # and what all had completed in its own world was decided with that generation.
        mine = completed if lived == self._lived else self._settled[lived]
        self._settled[self._acceptor.membership.generation] = mine
        return mine

    # ---- the one that leads ----

    async def _lead(self) -> LeaderStore:
        joined = await self._gather()
        try:
            return await self._ballot(joined)
        except ConnectionError as error:
            _close(joined)
            raise _Again(f"a survivor was lost: {error}") from error
        except BaseException:
            _close(joined)
            raise

    async def _gather(self) -> dict[int, tuple[RankConnection, Message]]:
        """Return the ranks that came, when all others are dead, silent, or have been waited for long enough.

        One that looks for survivors too is waited for as long as it may take to find this rank.
        """
        until = max(self._began + self._timeout, time.monotonic() + self._acceptor.patience)
        joined: dict[int, tuple[RankConnection, Message]] = {}
        higher = [rank for rank in self._acceptor.membership.members if rank > self._rank]
        alive: set[int] = set()
        watches = {rank: asyncio.create_task(self._watch(rank, alive)) for rank in higher}
        telling = asyncio.create_task(self._late.tell_of(lambda: alive & self._idle - joined.keys()))
        arrival = asyncio.ensure_future(self._acceptor.arrived.get())
        try:
            while missing := [rank for rank in higher if rank not in joined and not watches[rank].done()]:
                late = alive & self._late_ones()
                now = time.monotonic()
                if now >= until or (now >= self._began + self._timeout and late.issuperset(missing)):
                    self._late.leave_out(alive & self._idle & set(missing))
                    break
                await asyncio.wait(
                    [arrival, *(watches[rank] for rank in missing)],
                    timeout=min(until - now, RETRY_SECONDS),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for watch in watches.values():
                    if watch.done():
                        watch.result()  # raises what it learnt
                if arrival.done():
                    connection, join = arrival.result()
                    arrival = asyncio.ensure_future(self._acceptor.arrived.get())
                    await self._admit(joined, connection, join)
        except BaseException:
            _close(joined)
            raise
        finally:
            for task in [arrival, telling, *watches.values()]:
                task.cancel()
            arrived, *_ = await asyncio.gather(arrival, telling, *watches.values(), return_exceptions=True)
            if isinstance(arrived, tuple):
                self._acceptor.arrived.put_nowait(arrived)
        return joined

    async def _admit(
        self, joined: dict[int, tuple[RankConnection, Message]], connection: RankConnection, join: Message
    ) -> None:
        self._acceptor.take(connection)
        known = self._acceptor.membership
        if join["generation"] != known.generation or join["rank"] not in known.members:
            connection.close()  # it has been told what this rank knows
            await self._learn(join)
            return
        if join["rank"] in self._apart:
            text = _no_member("its host cannot reach that of another rank")
            with contextlib.suppress(ConnectionError):
                await connection.send({"kind": "minority", "text": text})
            connection.close()
            return
        if join["rank"] in joined:
            joined[join["rank"]][0].close()
        joined[join["rank"]] = connection, join
        with contextlib.suppress(ConnectionError):  # whoever is lost now is missed later
            await connection.send({"kind": "admitted"})

    async def _watch(self, rank: int, alive: set[int]) -> None:
        """Returns when a rank is dead or silent; until then it is among those ``alive`` while it answers."""
        if rank != self._suspect:
            await asyncio.sleep(WATCH_AFTER_SECONDS)
        while (connection := await self._reach(rank)) is not None:
            alive.add(rank)
            try:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await self._hear(rank, await connection.receive())
            finally:
                alive.discard(rank)
                connection.close()

    async def _ballot(self, joined: dict[int, tuple[RankConnection, Message]]) -> LeaderStore:
        known = self._acceptor.membership
        present = sorted([self._rank, *joined])
        connections = {rank: connection for rank, (connection, _) in joined.items()}
        if not is_quorum(present, known.members):
            text = self._minority(present)
            await self._send(connections, {"kind": "minority", "text": text})
            raise RendezvousError(text)
        joins = [self._join(), *(join for _, join in joined.values())]
        highest = max(int(join["promised"][0]) for join in joins)
        ballot = self._promised = highest + 1, self._rank
        await self._ask(connections, {"kind": "prepare", "ballot": ballot}, "promise")
        accepted = [(tuple(a), tuple(members)) for a, members in (j["accepted"] for j in joins if j["accepted"])]
        members = max(accepted)[1] if accepted else tuple(present)
        self._accepted = ballot, members
        await self._ask(connections, {"kind": "accept", "ballot": ballot, "members": members}, "accepted")
        latest = max(join["lived"] for join in joins)
        completed = min(join["completed"] if join["lived"] == latest else 0 for join in joins)
        complete = members == tuple(present)
        decided = known.after(known.generation + 1, members)
        told = {"kind": "decided", **decided.encode(), "complete": complete, "completed": completed, "lived": latest}
        await self._send(connections, told)
        await self._decide(decided)
        if not complete:
            raise _Again("a membership of before was decided on")
        return LeaderStore(self._acceptor, connections, self._settle(latest, completed))

    def _minority(self, present: Sequence[int]) -> str:
        members = self._acceptor.membership.members
        now = [members.index(rank) for rank in present]
        seconds = time.monotonic() - self._began
        late = self._late.in_words(self._late.left_out - set(present))
        found = f"rank {now[0]} was" if len(now) == 1 else f"ranks {ranges(now)} were"  # 2 alone reads as their number
        return (
            f"of the {len(members)} ranks only {found} found, in {seconds:.1f} s: "
            f"not more than half of them, nor half with rank 0, and so the others may have gone on without them"
            + (f"; {late}" if late else "")
        )

    @staticmethod
    async def _send(connections: dict[int, RankConnection], message: Message) -> None:
        await asyncio.gather(*(connection.send(message) for connection in connections.values()))

    async def _ask(self, connections: dict[int, RankConnection], message: Message, answer: str) -> None:
        await self._send(connections, message)
        for told in await asyncio.gather(*(connection.receive() for connection in connections.values())):
            if told["kind"] != answer:
                raise ConnectionError(f"it answers {told['kind']}")


def _discard(found: tuple[RankConnection, Message]) -> None:
    found[0].close()


def _close(joined: dict[int, tuple[RankConnection, Message]]) -> None:
    for connection, _ in joined.values():
        connection.close()
