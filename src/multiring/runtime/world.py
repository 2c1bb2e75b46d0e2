"""A job that has come together, as one rank sees it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from multiring import env
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost, RendezvousError
from multiring.net.membership import Membership
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Topology
from multiring.runtime import flight_recorder, trace
from multiring.runtime.engine import Engine, Remembering
from multiring.runtime.sampler import Sampler

if TYPE_CHECKING:  # asyncio, which a world of one does without
    from multiring.net.acceptor import Acceptor
    from multiring.net.links import Links

LINK_SHARE = 0.9
"""Part of a call's time-out that making its links may take: who cannot be reached is named before others' calls
time out."""

LONGEST_GAP = 4.0
"""Seconds in which a dialled rank that can be reached again may hear nothing: TCP asks after 1, 3 and 7 s."""

LONGEST_STEP = 1.0
"""Seconds that count at most between two looks at links that are being made: a rank that was stopped accuses nobody."""

LEAVING_SECONDS = 0.5
"""Seconds after a rank's farewell in which a link that it made may still be completed here."""


@dataclass(frozen=True)
class World:
    """A job that has come together: its engine, and its topology, in which ranks of one host share memory.

    ``links`` is None where all ranks share a host.
    """

    rank: int
    topology: Topology
    engine: Engine
    links: Links | None
    settings: env.Settings
    acceptor: Acceptor | None = None
    """None where this rank has always been alone."""
    measured: str = ""
    """Text of a file or a measurement of the links between the hosts; "": the topology has the usual ones."""
    membership: Membership = field(default_factory=partial(Membership.at_start, 1))
    """Its ranks by those that they had at the job's start, and when each came."""
    groups: dict[int, int] = field(default_factory=dict)
    """The sizes of the communicators that exist, by their numbers."""
    dropped: deque[int] = field(default_factory=deque)
    """Numbers of groups that nobody can call any more, and that were not closed: the next group frees them."""
    draws: Iterator[int] = field(default_factory=itertools.count)
    """Counts the numbers that this rank draws for groups."""
    timeline: trace.Timeline | None = None
    sampler: Sampler | None = None
    """Tells where this rank is when the others wait for it; None where it is alone."""
    recorder: flight_recorder.FlightRecorder | None = None
    speeds: Speeds = NATIVE
    """Speeds of its ranks, with the effect of shared cores."""
    began: float = field(default_factory=time.monotonic)
    left: threading.Event = field(default_factory=threading.Event)
    """True if this rank has left the job, or this generation of it."""
    former: dict[str, Any] = field(default_factory=dict)
    """The account of the generations before this one, if there were any."""

    @property
    def known(self) -> bool:
        """True if somebody said or measured how the hosts are linked."""
        return bool(self.measured)

    def connect(self, peers: set[int], timeout: float, *, any_source: bool = False) -> None:
        """Make the links to ``peers`` that do not stand yet, for a call that has ``timeout`` seconds.

        Whatever prevents it fails the engine, so that all ranks hear of it; it is left to the call to raise that, and
        to say which it was. With ``any_source`` those that have left are not needed, as long as another one can have
        sent something.
        """
        deadline = time.monotonic() + LINK_SHARE * timeout
        while self.links and (missing := {peer for peer in peers if not self.engine.attached(peer)}):
            remaining = max(deadline - time.monotonic(), 0.0)
            try:
                return self.links.ensure_data(missing, remaining, self._obstacle(missing))
            except MultiringError as error:
                if self.engine.failure() is not None:
                    return
                possible = {peer for peer in peers if self.engine.attached(peer) or not self.engine.departed(peer)}
                if not (any_source and possible and isinstance(error, PeerLost)):
                    kind = "CollectiveTimeout" if isinstance(error, RendezvousError) else type(error).__name__
                    return self.engine.fail(kind, error.rank if error.rank >= 0 else self.rank, str(error))
                peers = possible

    def _obstacle(self, peers: set[int]) -> Callable[[], BaseException | None]:
        """Tells why links to ``peers`` cannot come about any more: the engine has failed, or one of them has left.

        It is asked several times a second. Where no link has come about for longer than a heartbeat time-out, it tells
        the engine whom this rank dials: where that one dials it in vain as well, the two hosts cannot reach each other.
        """
        first_seen: dict[int, float] = {}
        asked, in_vain, dialled = time.monotonic(), 0.0, len(peers)

        def find() -> BaseException | None:
            nonlocal asked, in_vain, dialled
            now = time.monotonic()
            missing = [peer for peer in sorted(peers) if self.links and self.links.dials(peer)]
            in_vain = in_vain + min(now - asked, LONGEST_STEP) if len(missing) == dialled else 0.0
            asked, dialled = now, len(missing)
            if in_vain >= self.settings.heartbeat_timeout + LONGEST_GAP:
                hosts = self.topology.hosts
                for peer in {hosts[peer]: peer for peer in reversed(missing)}.values():  # the lowest of each host
                    self.engine.miss_connection(peer, in_vain)
            for peer in sorted(peers):
                if self.engine.departed(peer) and now - first_seen.setdefault(peer, now) >= LEAVING_SECONDS:
                    name = f"rank {peer} (host {self.topology.hosts[peer]})"
                    return self.engine.failure() or PeerLost(f"{name} has shut down, and was not linked yet", rank=peer)
            return self.engine.failure()

        return find

    def close(self) -> None:
        """Say farewell and release everything. May be called twice."""
        try:
            self.leave()
        finally:
            flight_recorder.requests.let_go()
            if self.acceptor:
                self.acceptor.close()

    def leave(self) -> None:
        """Say farewell and release everything but the acceptor, for another generation to come. May be called twice."""
        self.left.set()
        if self.links:
            self.links.close()
        slow = [] if self.timeline is None else self.engine.statistics()["slow_so_far"]
        if self.recorder is not None:
            self.recorder.stop()
        try:
            self.engine.shutdown()
        except MultiringError as late:
            if self.recorder is not None:
                self.recorder.write(late)
            raise
        finally:
            if self.timeline is not None:
                places = {} if self.sampler is None else self.sampler.places
                self.timeline.write(self.engine.traced(), slow, places)

    def account(self) -> dict[str, Any]:
        """Return the account of this rank since it joined the job: its calls, and the ranks its callers waited for."""
        counted = self.engine.statistics()
        peers, members = counted["peers"], self.membership.members
        account = {
            "seconds": time.monotonic() - self.began,
            "calls": counted["operations"],
            "bytes": sum(peer["bytes_sent"] for peer in peers.values()),
            "in_calls": counted["seconds_in_calls"],
            "waiting": counted["seconds_waiting"],
            "waited_for": Counter({members[rank]: peer.get("seconds_waited", 0.0) for rank, peer in peers.items()}),
            "slow": [{**slow, "ranks": [members[rank] for rank in slow["ranks"]]} for slow in counted["slow_so_far"]],
            "slow_links": counted["slow_links_so_far"],
            "places": [] if self.sampler is None else list(self.sampler.places.items()),
        }
        return {name: self.former[name] + account[name] for name in account} if self.former else account

    def has_failed_for_good(self) -> bool:
        """True if the failure stands on all ranks, and is no loss that they can leave behind by `shrink`."""
        failure = None if self.left.is_set() else self.engine.failure()
        return failure is not None and not isinstance(failure, (PeerLost, CollectiveTimeout))

    def disputed(self) -> dict[str, Any] | None:
        """A rank's word on a Mismatch, for the launcher: its own call if it is known, of how many ranks, and the error
        with the rank that it names."""
        failure = self.engine.failure()
        if not isinstance(failure, Mismatch):
            return None
        call = self.engine.disputed() if isinstance(self.engine, Remembering) else None
        size = 0 if call is None else self.groups[call[0]]
        message = self.membership.in_launchers_words(str(failure).partition("\n")[0])
        named = None if failure.rank == -1 else self.membership.members[failure.rank]
        return {"call": call, "size": size, "message": message, "named": named}

    def follow(self, former: World, account: dict[str, Any]) -> None:
        """Go on with the account of the generation before, and with what its timeline knows of the job's clock."""
        self.former.update(account)
        if self.timeline is not None and former.timeline is not None:
            self.timeline.offset = former.timeline.offset

    @property
    def settings_again(self) -> env.Settings:
        """Settings for another join: the host keeps the name by which it was told apart from others."""
        return replace(self.settings, host=self.topology.hosts[self.rank])
